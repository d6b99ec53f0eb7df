"""Accesses of many threads that are checked on a GPU: what is inside is read and written as ever, the rest is left out and named."""

from __future__ import annotations

import numpy as np
import pytest

from assembled import assemble_all
from tilewright.base.errors import UserError
from tilewright.base.target import parse_target
from tilewright.compile.build import build_artifact
from tilewright.ir.emulator import run_program
from tilewright.ir.program import Program
from tilewright.ir.text_parse import parse_program
from tilewright.passes.routes import lower

TEXT = """
program @p {{
  input x: tensor<f32, [n], [1], align=16>
  input at: tensor<{at}, [n], [1], align=16>
  output out: tensor<f32, [m], [1], align=16>
  call @p(x, at, out)
}}

kernel @p stage=loop {{
  param %x: tensor<f32, [n], [1], align=16>
  param %at: tensor<{at}, [n], [1], align=16>
  param %out: tensor<f32, [m], [1], align=16>
  fact n {fact}
  %n = size {{value = n}} : i64
  parallel %n (%i: i64) {{
{body}
    yield
  }}
}}
"""
SCATTER = """    %1 = load %x, %i : f32
    %2 = load %at, %i : {at}
    %3 = cast %2 {{dtype = i64}} : i64
    store %out, %3, %1 {{watch = [0]}}"""
MOVED = """    %1 = load %x, %i : f32
    %2 = const {{value = 64, dtype = i64}} : i64
    %3 = sub %i, %2 : i64
    store %out, %3, %1 {{watch = [0]}}"""
GATHER = """    %2 = load %at, %i : {at}
    %3 = cast %2 {{dtype = i64}} : i64
    %4 = load %x, %3 {{watch = [0]}} : f32
    store %out, %i, %4 {{watch = [0]}}"""


def program(body: str, at: str, fact: int, target: str = "sm_90a") -> dict[str, Program]:
    stages = lower(parse_program(TEXT.format(at=at, fact=fact, body=body.format(at=at))), parse_target(target), {"n": 1 << 20, "m": 1 << 20})
    return {"tile": stages.tile, "thread": stages.thread}


@pytest.mark.parametrize("at", ["i32", "i64"])
@pytest.mark.parametrize(("n", "m"), [(640, 600), (640, 640), (2048, 5), (1, 1), (31, 33), (1021, 1000), (640, 0)])
@pytest.mark.parametrize("body", [SCATTER, MOVED, GATHER], ids=["scatter", "moved", "gather"])
def test_what_is_inside_is_written_and_nothing_else(body: str, n: int, m: int, at: str) -> None:
    rng = np.random.default_rng(n + m)
    x = rng.standard_normal(n).astype(np.float32)
    places = rng.permutation(n) + (0 if body is SCATTER else -3)
    places[:1] = -1 if m > 600 else 2**31 - 1
    index = np.arange(n) - 64 if body is MOVED else np.arange(n) if body is GATHER else places
    values = np.where((places >= 0) & (places < n), x[np.clip(places, 0, n - 1)], 0) if body is GATHER else x
    inside = (index >= 0) & (index < m)
    wanted = np.full(m, 7, np.float32)
    wanted[index[inside]] = values[inside]
    for fact in (64, 1):
        if n % fact:
            continue
        for one in program(body, at, fact).values():
            out = np.full(m, 7, np.float32)
            with pytest.raises(UserError, match=r"TW050\]: p (reads|writes) '(x|out)' at index ") as caught:
                run_program(one, {"x": x, "at": places.astype(f"i{int(at[1:]) // 8}")}, {"out": out}, target=parse_target("sm_90a"))
            np.testing.assert_array_equal(out, wanted)
            named = int(str(caught.value).split("at index ")[1].split(",")[0])
            assert named in (places if "reads" in str(caught.value) else index[~inside])


def test_vectors_stay_vectors() -> None:
    """Where all of a vector is inside, it is written at once, as without checks."""
    code = build_artifact(program(MOVED, "i32", 64)["thread"], parse_target("sm_90a")).code.decode()
    assert "st.global.v4.b32" in code and "trap" not in code


def test_it_assembles() -> None:
    targets = ("sm_75", "sm_80", "sm_90a", "sm_120")
    modules = [(build_artifact(program(body, at, 64, t)["thread"], parse_target(t)).code.decode(), t) for t in targets for body, at in ((SCATTER, "i32"), (MOVED, "i64"), (GATHER, "i64"))]
    for found in assemble_all(modules):
        assert found.local <= 16  # predicates, of which there are few


def test_tests_take_no_registers_from_blocks_that_are_inside() -> None:
    """A kernel that moves numbers keeps all threads of a multiprocessor: what asks elements one by one may spill."""
    attrs = program(MOVED, "i32", 64)["thread"].calls[0].kernel.attrs
    assert attrs["min_blocks"] == 2048 // program(MOVED, "i32", 64)["thread"].calls[0].kernel.threads and "light" not in attrs
    assert "min_blocks" not in program(SCATTER, "i32", 64)["thread"].calls[0].kernel.attrs
