"""`tilewright inspect --fusion`: what the report says of kernels made of kernels, and of the launches that are left."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from tilewright.cli.main import cli

PYTHON = """\
import tilewright as tw


@tw.kernel
def project(x: tw.Array, w: tw.Array) -> tw.Array:
    m, depth = x.shape
    n = w.shape[1]
    h = tw.empty((m, n), x.dtype)
    for i, j in tw.grid(m, n):
        total = 0.0
        for k in range(depth):
            total += x[i, k] * w[k, j]
        h[i, j] = total
    return h


@tw.kernel
def mlp(x: tw.Array, up: tw.Array, down: tw.Array) -> tw.Array:
    h = tw.gelu(project(x, up))
    return project(h, down)
"""
ZYN = """\
fn project(x, w):
    return compute(x, w) {
        for i in 0..m, j in 0..n:
            var total = 0.0
            for k in 0..depth:
                total += x[i, k] * w[k, j]
            out[i, j] = total
    }

pipeline mlp(x, up, down):
    let h = gelu(project(x, up))
    return project(h, down)

let y = mlp(x, up, down)
"""


def report(path: Path, *options: str) -> str:
    arguments = ["--args", "x=f32[512,256] up=f32[256,1024] down=f32[1024,256]", "--target", "sm_90a"]
    done = CliRunner().invoke(cli, ["inspect", str(path), "--fusion", *arguments, *options], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_python(tmp_path: Path) -> None:
    path = tmp_path / "k.py"
    path.write_text(PYTHON)
    lines = report(path, "--kernel", "mlp").splitlines()
    assert lines[0] == "mlp: 3 kernels as written, 2 after fusion"
    assert lines[1] == "  project_h: computed right after it is made (line 13, called in line 19 and line 19); 4 MiB not moved"
    assert lines[2] == (
        "  h: stays in memory (line 19 to line 12, called in line 20): 'h' is finished only after its sums over 'k' (line 11), "
        "and the loop over 'project_k' (line 11) needs many elements of it"
    )
    assert lines[3] == "    one result reads 4 KiB of it; a block of sm_90a has 227 KiB of shared memory, room for 56 such"
    assert len(lines) == 6
    for line in lines[4:]:
        assert re.fullmatch(r"  launch tw_mlp_\d_\d: grid .* = \d+, \d+ threads(, \d+ registers)?, \d+ bytes shared", line), line


def test_zynml(tmp_path: Path) -> None:
    path = tmp_path / "k.zyn"
    path.write_text(ZYN)
    lines = report(path).splitlines()
    assert lines[0] == "y: 3 kernels as written, 2 after fusion"
    assert re.match(r"  \w+: computed right after it is made \(line 7, called in line 11, called in line 14 and line 11, called in line 14\)", lines[1])
    assert "stays in memory" in lines[2]


@pytest.mark.parametrize("target", ["sm_90a", "x86-64-avx512"])
def test_json(tmp_path: Path, target: str) -> None:
    path = tmp_path / "k.py"
    path.write_text(PYTHON)
    (found,) = json.loads(report(path, "--kernel", "mlp", "--json", "--target", target))
    assert (found["before"], found["after"]) == (3, 2)
    (fused,) = found["fused"]
    assert fused["saved"] == 8 * 512 * 1024
    assert fused["made"] == f"{path}:13:9, called at {path}:19:17"
    (kept,) = found["kept"]
    assert kept["needed"].startswith("4*")
    assert [launch["entry"] for launch in found["launches"]]
    assert all(launch["threads"] >= 1 for launch in found["launches"])
