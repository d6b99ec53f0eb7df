"""What is asked again of the same kernel is not found out again: proofs of indices, and the loop stage."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest

import tilewright as tw
from tilewright.analysis import affine, index_proofs, loop_nest, ranges
from tilewright.analysis.index_proofs import reaches, unproven_accesses
from tilewright.base.dtypes import f32, i32
from tilewright.base.intervals import Interval
from tilewright.base.sizes import Size
from tilewright.compile import driver
from tilewright.compile.driver import Signature, front_end
from tilewright.ir.program import Program
from tilewright.tree.typed import ArrayArg


@tw.kernel
def shifted(x: tw.Array, at: tw.Array) -> tw.Array:
    (n,) = x.shape
    out = tw.empty((n,), x.dtype)
    for i in tw.grid(n):
        if i > 0:
            out[i] = x[i - 1] + x[at[i]]
        else:
            out[i] = x[i]
    return out


SIGNATURE = Signature((ArrayArg(f32, 1), ArrayArg(i32, 1)))


@pytest.fixture
def program() -> Program:
    driver.forget()
    return front_end(shifted.function, SIGNATURE)[1]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The indices that were looked at."""
    seen: list[object] = []
    inside = index_proofs._Proofs.is_inside

    def noted(self: index_proofs._Proofs, index: object, *rest: object) -> bool:
        seen.append(index)
        return inside(self, index, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(index_proofs._Proofs, "is_inside", noted)
    monkeypatch.setattr(index_proofs, "_latest", None)
    return seen


def test_proofs_are_made_once(program: Program, asked: list[object]) -> None:
    (call,) = program.calls
    found = [(op.opcode, axes) for op, axes in unproven_accesses(call.kernel, program.checks)]
    assert ("load", (0,)) in found  # x[at[i]]
    count = len(asked)
    assert count >= 5
    assert [(op.opcode, axes) for op, axes in unproven_accesses(call.kernel, program.checks)] == found
    list(reaches(call.kernel, program.checks))
    assert len(asked) == count


def test_other_checks_need_other_proofs(program: Program, asked: list[object]) -> None:
    (call,) = program.calls
    with_checks = [(op.opcode, axes) for op, axes in unproven_accesses(call.kernel, program.checks)]
    without = [(op.opcode, axes) for op, axes in unproven_accesses(call.kernel, ())]
    again = [(op.opcode, axes) for op, axes in unproven_accesses(call.kernel, program.checks)]
    assert program.checks and again == with_checks != without


def test_the_loop_stage_is_made_once(program: Program) -> None:
    assert front_end(shifted.function, SIGNATURE)[1] is program
    other = front_end(shifted.function, Signature((ArrayArg(i32, 1), ArrayArg(i32, 1))))[1]
    assert other is not program and other.input_arrays[0].type.dtype is i32
    driver.forget()
    assert front_end(shifted.function, SIGNATURE)[1] is not program


def test_few_loop_stages_are_kept(program: Program) -> None:
    for number in range(driver._FRONTS):
        front_end(shifted.function, Signature(SIGNATURE.args, hints=(("x", 0, 16 + number),)))
    assert len(driver._fronts) <= driver._FRONTS
    assert front_end(shifted.function, SIGNATURE)[1] is not program


@pytest.mark.parametrize("analyse", [affine.analyse, ranges.analyse])
def test_forms_and_ranges_are_the_askers_own(analyse: object, program: Program) -> None:
    (call,) = program.calls
    first = analyse(call.kernel)  # type: ignore[operator]
    again = analyse(call.kernel)  # type: ignore[operator]
    assert first == again and first is not again and first
    again.clear()
    assert analyse(call.kernel) == first  # type: ignore[operator]


def test_what_is_given_counts(program: Program) -> None:
    kernel = program.calls[0].kernel
    (index,) = kernel.body.ops[-1].regions[0].args
    assert ranges.analyse(kernel) != ranges.analyse(kernel, {kernel.params[0]: Interval(Size.of(3), Size.of(5))})
    assert kernel.params[0] not in ranges.analyse(kernel) and index in affine.analyse(kernel)


def test_answers_go_with_their_kernel(program: Program) -> None:
    kernel = replace(program.calls[0].kernel, name="other")
    assert loop_nest.nest_of(kernel) is loop_nest.nest_of(kernel)
    affine.analyse(kernel)
    ranges.analyse(kernel)
    assert all(kernel in known for known in (loop_nest._known, affine._known, ranges._known))
    gone = weakref.ref(kernel)
    del kernel
    gc.collect()
    assert gone() is None
