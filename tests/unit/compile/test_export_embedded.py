"""GPU code as data of a host object: a C program that links it finds the very bytes, and a table that says how to launch them. No GPU is needed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import tilewright as tw
from tilewright.base.errors import TargetLimit, UserError
from tilewright.cli.main import cli
from tilewright.runtime.loaders.common import BoundSizes
from tilewright.zyn.load import load

COMPILER = shutil.which("clang-19") or shutil.which("clang") or shutil.which("cc")
needs_c = pytest.mark.skipif(
    COMPILER is None or sys.platform != "linux", reason="needs Linux and a C compiler (clang-19, clang or cc)"
)

PRINTER = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "%(name)s_embedded.h"
%(more)s
static void write_file(const char *path, const unsigned char *bytes, int64_t count) {
    FILE *file = fopen(path, "wb");
    if (bytes) fwrite(bytes, 1, (size_t)count, file);
    fclose(file);
}
int main(int count, char **words) {
    const tilewright_program *p = &%(name)s_program;
    write_file("found.ptx", p->ptx, p->ptx_bytes + 1);
    write_file("found.cubin", p->cubin, p->cubin_bytes);
    int64_t sizes[32] = {0};
    if (count - 1 != p->given_count || p->size_count > 32) return 1;
    for (int i = 0; i < p->given_count; ++i) sizes[i] = strtoll(words[i + 1], NULL, 10);
    int32_t code = p->check(sizes);
    printf("{\\"name\\": \\"%%s\\", \\"target\\": \\"%%s\\", \\"code\\": %%d, \\"error\\": \\"%%s\\", \\"sizes\\": {", p->name, p->target, code, %(name)s_embedded_error(code));
    for (int i = 0; i < p->size_count; ++i) printf("%%s\\"%%s\\": %%lld", i ? ", " : "", p->sizes[i], (long long)sizes[i]);
    printf("}, \\"parameters\\": [");
    for (int i = 0; i < p->parameter_count; ++i)
        printf("%%s[\\"%%s\\", \\"%%s\\", %%d, %%d, \\"%%s\\"]", i ? ", " : "", p->parameters[i].name, p->parameters[i].dtype, p->parameters[i].role, p->parameters[i].rank, p->parameters[i].shape);
    printf("], \\"scratch\\": [");
    for (int i = 0; i < p->scratch_count; ++i)
        printf("%%s[\\"%%s\\", %%lld, %%d]", i ? ", " : "", p->scratch[i].name, (long long)p->scratch[i].bytes(sizes), p->scratch[i].zeroed);
    printf("], \\"launches\\": [");
    for (int i = 0; i < p->launch_count; ++i) {
        const tilewright_launch *l = &p->launches[i];
        uint32_t grid[3] = {7, 7, 7};
        int32_t fits = l->grid(sizes, grid);
        printf("%%s{\\"entry\\": \\"%%s\\", \\"threads\\": %%d, \\"shared\\": %%d, \\"cluster\\": %%d, \\"cooperative\\": %%d, \\"persistent\\": %%d, \\"fits\\": %%d, \\"grid\\": [%%u, %%u, %%u], \\"arguments\\": [",
               i ? ", " : "", l->entry, l->threads, l->shared_bytes, l->cluster, l->cooperative, l->persistent, fits, grid[0], grid[1], grid[2]);
        for (int a = 0; a < l->argument_count; ++a) {
            const tilewright_argument *g = &l->arguments[a];
            const char *name = g->kind == TW_POINTER || g->kind == TW_NUMBER ? p->parameters[g->index].name
                : g->kind == TW_SCRATCH_POINTER ? p->scratch[g->index].name : g->kind == TW_SIZE ? p->sizes[g->index] : "map";
            printf("%%s[%%d, \\"%%s\\"]", a ? ", " : "", g->kind, name);
        }
        printf("], \\"maps\\": [");
        for (int m = 0; m < l->map_count; ++m) {
            const tilewright_map *t = &l->maps[m];
            int64_t shape[5] = {0}, strides[5] = {0};
            if (t->extents(sizes, shape, strides)) return 2;
            printf("%%s{\\"dtype\\": \\"%%s\\", \\"swizzle\\": %%d, \\"array\\": \\"%%s\\", \\"axes\\": [", m ? ", " : "", t->dtype, t->swizzle,
                   t->array.kind == TW_POINTER ? p->parameters[t->array.index].name : p->scratch[t->array.index].name);
            for (int a = 0; a < t->rank; ++a) printf("%%s[%%lld, %%lld, %%d]", a ? ", " : "", (long long)shape[a], (long long)strides[a], t->box[a]);
            printf("]}");
        }
        printf("]}");
    }
    printf("]}\\n");
    return 0;
}
"""


def described(
    folder: Path, name: str, sizes: Sequence[int], more: str = "", objects: Sequence[str] = ()
) -> dict[str, Any]:
    """What a C program prints of the table."""
    (folder / "main.c").write_text(PRINTER % {"name": name, "more": more})
    assert COMPILER is not None
    command = [COMPILER, "-Wall", "-Wextra", "-Werror", "-std=c11", "main.c", f"{name}.o", *objects, "-o", "main"]
    made = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    assert made.returncode == 0, made.stderr
    done = subprocess.run(
        ["./main", *map(str, sizes)], cwd=folder, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, (done.returncode, done.stdout)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def loader_of(folder: Path, name: str) -> Mapping[str, Any]:
    """The description in the Python loader, which has the launches as texts of Python."""
    text = (folder / f"{name}.py").read_text()
    start = text.index("DESCRIPTION = ") + len("DESCRIPTION = ")
    import ast

    found: Mapping[str, Any] = ast.literal_eval(text[start : text.index(f"\n\n{name} = Program(")])
    return found


def agrees(folder: Path, name: str, found: Mapping[str, Any]) -> None:
    """The bytes are those of the files; entries, grids, threads and arguments are those of the loader."""
    assert (folder / "found.ptx").read_bytes() == (folder / f"{name}.ptx").read_bytes() + b"\0"
    cubin = folder / f"{name}.cubin"
    assert (folder / "found.cubin").read_bytes() == (cubin.read_bytes() if cubin.exists() else b"")
    loader = loader_of(folder, name)
    texts = BoundSizes()
    assert found["code"] == 0, found["error"]
    assert [launch["entry"] for launch in found["launches"]] == [launch["entry"] for launch in loader["launches"]]
    for launch, known in zip(found["launches"], loader["launches"], strict=True):
        entry = re.search(rf"\.entry\s+{launch['entry']}\s*\(", (folder / f"{name}.ptx").read_text())
        assert entry is not None
        assert launch["fits"] == 0
        assert launch["grid"] == [*texts.values(known["grid"], found["sizes"]), 1, 1, 1][:3]
        assert (launch["threads"], launch["shared"], launch["cluster"]) == (
            known["threads"],
            known["shared"],
            known["cluster"],
        )
        assert (launch["cooperative"], launch["persistent"]) == (int(known["cooperative"]), int(known["persistent"]))
        wanted = [*known["args"], *known["sizes"], *("map" for _ in known["maps"])]
        assert [argument for _, argument in launch["arguments"]] == wanted
        for one, other in zip(launch["maps"], known["maps"], strict=True):
            shape, strides = (
                texts.values(other["shape"], found["sizes"]),
                texts.values(other["strides"], found["sizes"]),
            )
            assert one["axes"] == [list(axis) for axis in zip(shape, strides, other["box"], strict=True)]
            assert (one["array"], one["dtype"], one["swizzle"]) == (other["array"], other["dtype"], other["swizzle"])
    assert [p[0] for p in found["parameters"]] == [p[0] for p in (*loader["inputs"], *loader["outputs"])]


@tw.kernel
def norms(x: tw.Array) -> tw.Array:
    """Two launches: the sums are scratch."""
    n, m = x.shape
    totals = tw.empty((m,), tw.f32)
    for j in tw.grid(m):
        total = 0.0
        for i in range(n):
            total += x[i, j] * x[i, j]
        totals[j] = total
    out = tw.empty((n, m), tw.f32)
    for i, j in tw.grid(n, m):
        out[i, j] = x[i, j] / tw.sqrt(totals[j])
    return out


@tw.kernel
def times(a: tw.Array, b: tw.Array) -> tw.Array:
    n, k = a.shape
    m = b.shape[1]
    out = tw.empty((n, m), tw.f32)
    for i, j in tw.grid(n, m):
        total = 0.0
        for p in range(k):
            total += a[i, p] * b[p, j]
        out[i, j] = total
    return out


@tw.kernel
def placed(x: tw.Array, rows: tw.Array, y: tw.InOut, step: int, gain: tw.f32) -> None:
    """Indices that nothing proves, numbers, and an array that is written in place."""
    for i in tw.grid(rows.shape[0]):
        y[rows[i]] += x[i] * gain + step


@needs_c
def test_the_table_of_several_launches(tmp_path: Path) -> None:
    files = {p.name for p in tw.export(norms, "f32[*,*]", target="sm_80", folder=tmp_path, embed=True)}
    assert {"norms.o", "norms_embedded.h", "norms.ptx", "norms.h", "norms.py"} <= files
    for sizes in ((33, 70), (1000, 1), (1, 4096)):
        found = described(tmp_path, "norms", sizes)
        agrees(tmp_path, "norms", found)
        assert found["target"] == "sm_80"
        assert sum(size for _, size, _ in found["scratch"]) >= 4 * sizes[1]
        assert found["parameters"][0][:4] == ["x", "f32", 0, 2]
    assert described(tmp_path, "norms", (-1, 4))["error"] == "a size is negative"
    large = described(tmp_path, "norms", (1 << 62, 1 << 40))
    assert large["launches"][-1]["fits"] == -4


@needs_c
def test_tensor_maps_and_checks(tmp_path: Path) -> None:
    """A Hopper product: its copies are described by maps, its sizes are promised."""
    a = np.zeros((256, 256), tw.bf16.numpy)  # type: ignore[attr-defined]
    tw.export(times, a, a, target="sm_90a", folder=tmp_path, embed=True)
    sizes = [256] * len(re.findall(r"^   \d+: \w+$", (tmp_path / "times_embedded.h").read_text(), re.M))
    found = described(tmp_path, "times", sizes)
    agrees(tmp_path, "times", found)
    assert any(launch["maps"] for launch in found["launches"])
    wrong = described(tmp_path, "times", [257] * len(sizes))
    assert wrong["code"] > 0
    assert "must be a multiple of" in wrong["error"]


@needs_c
def test_indices_that_nothing_proves_and_two_programs_in_one(tmp_path: Path) -> None:
    tw.export(placed, "f32[*]", "i32[*]", "f32[*]", "int", "f32", target="sm_80", folder=tmp_path, embed=True)
    tw.export(norms, "f32[*,*]", target="sm_80", folder=tmp_path, embed=True)
    more = '#include "norms_embedded.h"\nconst void *other(void);\nconst void *other(void) { return &norms_program; }'
    header = (tmp_path / "placed_embedded.h").read_text()
    count = len(re.findall(r"^   \d+: \w+$", header, re.M))
    found = described(tmp_path, "placed", [40] * count, more, ["norms.o"])
    agrees(tmp_path, "placed", found)
    assert [array for array in found["scratch"] if array[2]] == [["$failure", 32, 1]]
    assert "'y' outside its extent" in header
    kinds = {name: kind for kind, name in found["launches"][0]["arguments"]}
    assert (kinds["x"], kinds["gain"], kinds["$failure"]) == (0, 1, 2)
    assert [p[2] for p in found["parameters"] if p[0] == "y"] == [2]


@needs_c
def test_an_explicit_kernel_from_the_command_line(tmp_path: Path) -> None:
    arguments = [
        "--kernel",
        "saxpy",
        "--args",
        "a=float x=f32[*] y=f32[*]",
        "--block",
        "128",
        "--target",
        "sm_90a",
        "--embed",
    ]
    done = CliRunner().invoke(cli, ["export", "examples/simt/saxpy.py", *arguments, "-o", str(tmp_path)])
    assert done.exit_code == 0, done.output
    given = len(re.findall(r"^   \d+: ", (tmp_path / "saxpy_embedded.h").read_text(), re.M))
    found = described(tmp_path, "saxpy", [300] * given)
    agrees(tmp_path, "saxpy", found)
    assert found["launches"][0]["threads"] == 128


def test_other_machines_and_wrong_calls(tmp_path: Path) -> None:
    tw.export(norms, "f32[*,*]", target="sm_80", folder=tmp_path, embed="x86-64-avx2")
    data = (tmp_path / "norms.o").read_bytes()
    assert data[:4] == b"\x7fELF" and data[18] == 62
    assert (tmp_path / "norms.ptx").read_bytes() in data
    with pytest.raises(TargetLimit, match="code is embedded for NVIDIA's GPUs, not for"):
        tw.export(norms, "f32[*,*]", folder=tmp_path, embed=True)
    with pytest.raises(TargetLimit, match="an object for a CPU, and sm_80 is none"):
        tw.export(norms, "f32[*,*]", target="sm_80", folder=tmp_path, embed="sm_80")
    program = load("pipeline p(x):\n    let y = compute(x) { for i in 0..n: out[i] = x[i] + 1.0 }\n    return y\n")
    with pytest.raises(UserError, match="embed= is for kernels of GPUs"):
        tw.export(program.p, "f32[*]", folder=tmp_path, embed=True)
