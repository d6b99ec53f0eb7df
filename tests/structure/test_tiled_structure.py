"""Texts over tiles become what plain loops become: the same schedule and the same code but for names, in both languages."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import kernels_tiled as text
from tilewright.base.dtypes import bf16
from tilewright.cli.main import cli
from tilewright.ir.text import print_kernel
from tilewright.passes.schedules.matrix import MatrixSchedule

TILED_PYTHON = """
import tilewright as tw

@tw.kernel
def attention(q, k, v):
    batch, heads, length, width = q.shape
    out = tw.empty((batch, heads, length, width), q.dtype)
    for b, h, block in tw.grid(batch, heads, range(0, length, {rows})):
        m = -tw.inf
        total = 0.0
        o = tw.zeros(({rows}, width))
        for kv in range(0, length, {keys}):
            s = q[b, h, block : block + {rows}] @ tw.transpose(k[b, h, kv : kv + {keys}]) / tw.sqrt(width)
            m_new = tw.maximum(m, tw.row_max(s))
            p = tw.exp(s - m_new)
            total = tw.exp(m - m_new) * total + tw.row_sum(p)
            o = tw.exp(m - m_new) * o + p @ v[b, h, kv : kv + {keys}]
            m = m_new
        out[b, h, block : block + {rows}] = o / total
    return out
"""

PLAIN_PYTHON = """
import tilewright as tw

@tw.kernel
def attention(q, k, v):
    batch, heads, length, width = q.shape
    out = tw.empty((batch, heads, length, width), q.dtype)
    for b, h, i in tw.grid(batch, heads, length):
        m = -tw.inf
        for j in range(length):
            m = max(m, tw.dot(q[b, h, i], k[b, h, j]) / tw.sqrt(width))
        total = 0.0
        for j in range(length):
            total += tw.exp(tw.dot(q[b, h, i], k[b, h, j]) / tw.sqrt(width) - m)
        for d in range(width):
            o = 0.0
            for j in range(length):
                o += tw.exp(tw.dot(q[b, h, i], k[b, h, j]) / tw.sqrt(width) - m) * v[b, h, j, d]
            out[b, h, i, d] = o / total
    return out
"""

TILED_ZYN = """
let attention = compute(q, k, v) {{
    @kernel flash_attention
    @workgroup(64)
    @tile(block_q={rows}, block_kv={keys})
    for b in 0..batch, h in 0..heads:
        for q_block in 0..length step {rows}:
            var m = -inf
            var l = 0.0
            var o = zeros({rows}, width)
            for kv_block in 0..length step {keys}:
                let K_block = k[b, h, kv_block:kv_block+{keys}]
                let V_block = v[b, h, kv_block:kv_block+{keys}]
                let S = q[b, h, q_block:q_block+{rows}] @ transpose(K_block) / sqrt(width)
                let m_new = max(m, row_max(S))
                let l_new = exp(m - m_new) * l + row_sum(exp(S - m_new))
                o = exp(m - m_new) * o + exp(S - m_new) @ V_block
                m = m_new
                l = l_new
            out[b, h, q_block:q_block+{rows}] = o / l
}}
"""

PLAIN_ZYN = """
let attention = compute(q, k, v) {
    @kernel attention
    for b in 0..batch, h in 0..heads, i in 0..length:
        var m = -inf
        for j in 0..length:
            m = max(m, dot(q[b, h, i], k[b, h, j]) / sqrt(width))
        var l = 0.0
        for j in 0..length:
            l += exp(dot(q[b, h, i], k[b, h, j]) / sqrt(width) - m)
        for d in 0..width:
            var o = 0.0
            for j in 0..length:
                o += exp(dot(q[b, h, i], k[b, h, j]) / sqrt(width) - m) * v[b, h, j, d]
            out[b, h, i, d] = o / l
}
"""

MASKED_ZYN = """
let attention = compute(q, k, v, mask) {
    @kernel attention
    for b in 0..batch, h in 0..heads, i in 0..length:
        var m = -inf
        for j in 0..length:
            if mask[i, j]:
                m = max(m, dot(q[b, h, i], k[b, h, j]) / sqrt(width))
        var l = 0.0
        for j in 0..length:
            if mask[i, j]:
                l += exp(dot(q[b, h, i], k[b, h, j]) / sqrt(width) - m)
        for d in 0..width:
            var acc = 0.0
            for j in 0..length:
                if mask[i, j]:
                    acc += exp(dot(q[b, h, i], k[b, h, j]) / sqrt(width) - m) / l * v[b, h, j, d]
            out[b, h, i, d] = acc
}
"""


class Printed:
    """What the command prints for a text."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, source: str, stage: str, length: int = 1024, more: str = "") -> str:
        path = self.folder / ("text.zyn" if "let " in source else "text.py")
        path.write_text(source)
        shapes = " ".join(f"{name}=bf16[2,4,{length},64]" for name in "qkv")
        given = ["compile", str(path), "--target", "sm_90a", "--args", f"{shapes}{more}", "--stage", stage]
        done = CliRunner().invoke(cli, given, prog_name="tilewright")
        assert done.exit_code == 0, done.output
        return done.output


@pytest.fixture
def printed(tmp_path: Path) -> Printed:
    return Printed(tmp_path)


def code(ptx: str) -> str:
    """Without files, lines and what is in debug sections."""
    lines = [line for line in ptx.split(".section")[0].splitlines() if not re.match(r"\s*\.(loc|file)\b", line)]
    assert len(lines) > 1000
    return "\n".join(lines)


@pytest.mark.parametrize(("rows", "keys"), [(64, 64), (32, 128)])
def test_tiled_attention_is_the_plain_one(rows: int, keys: int, printed: Printed) -> None:
    tiled = [source.format(rows=rows, keys=keys) for source in (TILED_PYTHON, TILED_ZYN)]
    threads = [printed(source, "thread") for source in (PLAIN_PYTHON, PLAIN_ZYN, *tiled)]
    assert 'schedule = "family=attention ' in threads[0]
    assert threads[2] == threads[0]
    # The attribute is followed, whatever the text's own tiles are.
    (schedule,) = set(re.findall(r'schedule = "([^"]*)"', threads[3]))
    assert (f" m={rows} " in f"{schedule} ", f" n={keys} " in f"{schedule} ") == (True, True), schedule
    hint = re.compile(r"^ *@tile.*\n", re.MULTILINE)
    assert printed(hint.sub("", tiled[1]), "thread") == printed(hint.sub("", PLAIN_ZYN), "thread") == threads[1]


def test_all_four_texts_are_one_ptx(printed: Printed) -> None:
    # The tile that the attribute asks for is the one that is chosen without it.
    texts = (PLAIN_PYTHON, PLAIN_ZYN, TILED_PYTHON.format(rows=64, keys=64), TILED_ZYN.format(rows=64, keys=128))
    assert len({code(printed(source, "ptx")) for source in texts}) == 1


def test_masked_attention_in_zyn(printed: Printed) -> None:
    assert 'schedule = "family=attention ' in printed(MASKED_ZYN, "tile", more=" mask=bool[1024,1024]")


def test_keys_up_to_the_block_of_the_queries(printed: Printed) -> None:
    """Attention whose keys end with a block of queries is attention: in both languages, whatever the blocks of keys, and with steps
    left out as in causal attention."""
    texts = []
    for source, whole, ends in (
        (TILED_PYTHON, "in range(0, length, {keys}):", "in range(0, block + {rows}, {keys}):"),
        (TILED_ZYN, "in 0..length step {keys}:", "in 0..q_block+{rows} step {keys}:"),
    ):
        before, found, after = source.rpartition(whole)
        assert found
        formatted = [(before + ends + after).format(rows=64, keys=keys) for keys in (64, 32)]
        texts += [re.sub(r" *@tile.*\n", "", text) for text in formatted]  # which would be followed
    assert len({code(printed(source, "ptx")) for source in texts}) == 1
    assert re.search(r'schedule = "family=attention .*dynamic=1', printed(texts[0], "thread", 8192))


@pytest.mark.parametrize("extents", [(512, 512, 512), (200, 72, 1000)])
def test_tiled_product_is_the_plain_one(extents: tuple[int, int, int]) -> None:
    rows, columns, depth = extents
    arguments = np.zeros((rows, depth), bf16.numpy), np.zeros((depth, columns), bf16.numpy)
    found = []
    for kernel in (text.plain_matmul, text.tiled_matmul):
        stages = kernel.stages(*arguments, target="sm_90a").stages
        families = [schedule.family for schedule in stages.schedules if isinstance(schedule, MatrixSchedule)]
        assert families == ["wgmma"]
        found.append([print_kernel(call.kernel).replace(kernel.python.__name__, "product") for call in stages.thread.calls])
    assert found[0] == found[1]
