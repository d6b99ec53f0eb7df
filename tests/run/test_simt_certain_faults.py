"""Races and divergent barriers that the text of an explicit kernel shows are errors when it is compiled; what may be right is not."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest

import tilewright as tw

HEAD = """import tilewright as tw


@tw.gpu
def kernel(x: tw.GpuBuffer[tw.f32], out: tw.GpuBuffer[tw.f32], n: tw.i32):
    s = tw.shared(128, tw.f32)
    t, i = tw.thread.x, tw.gpu_thread_id()
"""
FIRST = HEAD.count("\n") + 1
BAD: dict[str, tuple[str, int, str]] = {
    # name: (body, line of the fault in the body, what the message has; {k} is line k of the body)
    "half": ("if t < 16:\n    tw.gpu_sync()", 2, "divergent barrier: only 16 of 64 threads of a block come here: threads 16-63 went the other way at the `if` at {1}"),
    "else": ("if t >= 16:\n    out[i] = 1.0\nelse:\n    tw.gpu_sync()", 4, "only 16 of 64 threads of a block come here: threads 16-63 went the other way at the `if` at {1}"),
    "one thread": ("if t == 3:\n    tw.gpu_sync()", 2, "only 1 of 64 threads"),
    "odd threads": ("if t % 2:\n    tw.gpu_sync()", 2, "only 32 of 64 threads of a block come here: 32 threads, 0 the first, went the other way at the `if` at {1}"),
    "under a number": ("if n > 3:\n    if t < 16:\n        tw.gpu_sync()", 3, "at the `if` at {2}"),
    "under data": ("if x[i] > 0.0:\n    if t < 16:\n        tw.gpu_sync()", 3, "at the `if` at {2}"),
    "nested": ("if t < 32:\n    if t > 8:\n        tw.gpu_sync()", 3, "only 23 of 64 threads"),
    "left early": ("if t > 50:\n    return\nout[i] = 1.0\ntw.gpu_sync()", 4, "only 51 of 64 threads of a block come here: threads 51-63 went the other way at the `if` at {1}"),
    "rounds of a for": ("for k in range(t):\n    tw.gpu_sync()", 2, "only 63 of 64 threads of a block come here: thread 0 left the loop at {1}"),
    "later rounds": ("for k in range(t + 2):\n    tw.gpu_sync()", 2, "the loop at {1} has 2 round(s) in thread 0 and 65 in thread 63"),
    "strided rounds": ("for k in range(t, 100, 64):\n    tw.gpu_sync()", 2, "the loop at {1} has 1 round(s) in thread 36 and 2 in thread 0"),
    "rounds of a while": ("k = 0\nwhile k < 4 + t:\n    tw.gpu_sync()\n    k += 1", 3, "thread 0 left the loop at {2}"),
    "in a loop": ("for k in range(4):\n    if t < 16 * k:\n        tw.gpu_sync()", 3, "only 16 of 64 threads"),
    "counting barrier": ("if t < 16:\n    out[i] = tw.f32(tw.barrier_count(t > 3))", 2, "divergent barrier"),
    "result in one place": ("out[0] = x[t]", 1, "race on global memory: threads 0 and 1 of a block both store to 'out'[0], each a value of its own"),
    "numbers in one place": ("s[0] = tw.f32(t)", 1, "race on shared memory: threads 0 and 1 of a block both store to 's'[0]"),
    "place of the block": ("out[tw.block.x] = x[i] * 2.0", 1, "both store to the same element of 'out'"),
    "two in one place": ("out[t // 2] = x[i]", 1, "threads 0 and 1 of a block both store to 'out'[0]"),
    "wrapping": ("s[t % 32] = x[i]", 1, "threads 0 and 32 of a block both store to 's'[0]"),
    "half of them": ("if t < 8:\n    out[n] = x[i]", 2, "both store to the same element of 'out'"),
    "count without an atomic": ("out[0] += 1.0", 1, "race on global memory: thread 0 stores 'out'[0], which thread 1 of its block loads at {1}"),
    "neighbour": ("s[t] = x[i]\nout[i] = s[t + 1]", 2, "race on shared memory: thread 0 loads 's'[1], which thread 1 of its block stores at {1}, with no barrier between the two"),
    "reverse": ("s[t] = x[i]\nif t < 10:\n    out[i] = s[63 - t]", 3, "thread 0 loads 's'[63], which thread 63 of its block stores at {1}"),
    "the first for all": ("if t == 0:\n    s[0] = x[0]\nout[i] = s[0]", 3, "thread 1 loads 's'[0], which thread 0 of its block stores at {2}"),
    "shift in place": ("s[t] = x[i]\ntw.gpu_sync()\ns[t] = s[t + 1]", 3, "thread 1 stores 's'[1], which thread 0 of its block loads at {3}"),
    "other round": ("s[t] = x[i]\ntw.gpu_sync()\nfor k in range(3):\n    out[i] = s[63 - t]\n    tw.gpu_sync()\n    s[t] = x[i + k]", 4, "which thread 63 of its block stores at {6}"),
    "different numbers": ("s[t] = 1.0\ns[t + 1] = 2.0", 2, "thread 0 stores 's'[1], which thread 1 of its block stores at {1}"),
}  # fmt: skip

GOOD: dict[str, str] = {
    "all threads": "if t < 64:\n    tw.gpu_sync()\nif t < 0:\n    tw.gpu_sync()",
    "all or none": "if n > 3:\n    tw.gpu_sync()\nfor k in range(n):\n    tw.gpu_sync()",
    "the block decides": "if tw.block.x == 0:\n    tw.gpu_sync()\nif x[0] > 0.0:\n    tw.gpu_sync()",
    "depends on the call": "if i < n:\n    tw.gpu_sync()",
    "barriers of the first rounds": "for k in range(t + 3):\n    if k < 3:\n        tw.gpu_sync()",
    "rounds that are known": "k = 0\nwhile k < 3:\n    tw.gpu_sync()\n    k += 1",
    "strided": "for k in range(t, t + 128, 64):\n    tw.gpu_sync()",
    "warps of their own": "if t < 32:\n    tw.warp_sync()",
    "one thread stores": "if t == 0:\n    out[0] = x[t]\nif i == 0:\n    out[1] = x[i]\nif t == 5 and n > 2:\n    out[2] = x[i]",
    "leaves one": "if t > 0:\n    return\nout[0] = x[t]",
    "the same value": "out[0] = 1.0\ns[0] = x[0]\ns[1] = tw.f32(n)\nout[i] = s[0] + s[1]",
    "flag by data": "if x[i] > 0.0:\n    out[0] = x[i]",
    "sum of a warp": "out[0] = tw.f32(tw.redux_add(tw.i32(x[t % 32])))",
    "atomic": "tw.atomic_add(out, 0, x[i])",
    "lock": "while tw.atomic_cas(tw.shared(1, tw.i32), 0, 0, 1) != 0:\n    pass\nout[0] = x[i]",
    "own element": "s[t] = x[i]\nout[i] = s[t]\ns[t] = 2.0",
    "halves": "s[t] = x[i]\ns[t + 64] = x[i]\nout[i] = s[t + 64]",
    "barrier between": "s[t] = x[i]\ntw.gpu_sync()\nout[i] = s[63 - t]\ntw.gpu_sync()\ns[t] = 0.0",
    "barrier in the loop": "for k in range(n):\n    s[t] = x[i]\n    tw.gpu_sync()\n    out[i] = s[63 - t]\n    tw.gpu_sync()",
    "within a warp": "s[t] = x[i]\ntw.warp_sync()\nout[i] = s[t ^ 1]",
    "unknown place": "s[n] = 1.0\nout[i] = s[t]",
    "zero by all": "for k in range(4):\n    s[k] = 0.0\nout[i] = s[3]",
    "tree": "s[t] = x[i]\ntw.gpu_sync()\nstep = 32\nwhile step > 0:\n    if t < step:\n        s[t] += s[t + step]\n    tw.gpu_sync()\n    step //= 2\nif t == 0:\n    out[tw.block.x] = s[0]",
    "local": "v = tw.local(4, tw.f32)\nv[0] = x[t]\nout[i] = v[0]",
}  # fmt: skip


def kernel_of(tmp_path: Path, body: str) -> tw.GpuKernel[...]:
    path = tmp_path / "written.py"
    path.write_text(HEAD + "".join(f"    {line}\n" for line in body.split("\n")), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("written", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: tw.GpuKernel[...] = module.kernel
    return found


def arguments() -> tuple[object, ...]:
    return np.ones(256, np.float32), np.ones(256, np.float32), 5


@pytest.mark.parametrize("device", ["cpu", "emulator"])
@pytest.mark.parametrize("name", BAD)
def test_what_is_certain_is_refused(name: str, device: str, tmp_path: Path) -> None:
    body, line, text = BAD[name]
    with pytest.raises(tw.UserError) as error:
        kernel_of(tmp_path, body)[2, 64](*arguments(), device=device)
    assert error.value.code == "TW051"
    assert error.value.span.line == FIRST + line - 1
    for k in range(1, body.count("\n") + 2):
        text = text.replace(f"{{{k}}}", f"written.py:{FIRST + k - 1}")
    assert text in re.sub(r"(written\.py:\d+):\d+", r"\1", str(error.value).replace(f"{tmp_path}/", ""))


@pytest.mark.parametrize("name", GOOD)
def test_what_may_be_right_is_accepted(name: str, tmp_path: Path) -> None:
    kernel = kernel_of(tmp_path, GOOD[name])
    for block in (64, 32 if name != "all threads" else 64):
        kernel[2, block].thread_stage(*arguments())


def test_one_thread_has_nobody_to_race_with(tmp_path: Path) -> None:
    kernel = kernel_of(tmp_path, "out[0] = x[t]\nif t < 1:\n    tw.gpu_sync()\ns[t] = x[i]\nout[1] = s[t]")
    values = arguments()
    kernel[1, 1](*values, device="emulator")
    with pytest.raises(tw.UserError, match="TW051"):
        kernel[1, 2](*values, device="emulator")


def test_the_block_has_axes(tmp_path: Path) -> None:
    kernel = kernel_of(tmp_path, "if tw.thread.y < 2:\n    tw.gpu_sync()\nout[tw.thread.y] = x[tw.thread.x]")
    kernel[1, (1, 2)].thread_stage(*arguments())
    with pytest.raises(tw.UserError, match="both store to 'out'\\[0\\]"):
        kernel[1, (4, 2)].thread_stage(*arguments())
    with pytest.raises(tw.UserError, match="only 8 of 12 threads"):
        kernel[1, (4, 3)].thread_stage(*arguments())
