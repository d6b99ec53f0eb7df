"""The text of CUDA entry stubs: what it depends on, and that LLVM takes it for every kind of call."""

from __future__ import annotations

import itertools
import re

import pytest

from tilewright.base import launch_abi as abi
from tilewright.base.launch_abi import Layout, Pattern, Slot
from tilewright.base.target import host_cpu
from tilewright.codegen.host.launcher import engine_object, key_count, stub_ir, stub_object, value_count
from tilewright.codegen.host.launcher_text import ENGINE
from tilewright.codegen.llvm.native import optimised_ir

LAYOUT = Layout(16, 24, 32, 40, 48, 56, 64, tensor=16, tensor_gradient=24)
KINDS = [Slot(abi.OWN, 2), Slot(abi.TENSOR, 3), Slot(abi.CHECKED_TENSOR, 1), Slot(abi.FLOAT), Slot(abi.INTEGER), Slot(abi.BOOL)]


def body(text: str, name: str) -> str:
    found = re.search(rf"^define (?:internal )?[a-z0-9]+ @{name}\(.*?^}}", text, re.MULTILINE | re.DOTALL)
    assert found, name
    return found[0]


@pytest.mark.parametrize(("given", "results"), list(itertools.product([False, True], [1, 2])))
def test_every_kind_of_argument(given: bool, results: int) -> None:
    pattern = Pattern(tuple(KINDS), tuple([KINDS[0], KINDS[1]][:results]), given)
    assert stub_object(pattern, LAYOUT)
    assert value_count(pattern) == 6 + results
    assert key_count(pattern) == 1 + 7 + 3 + (given and 1 + 7 * (results == 2))


def test_a_call_without_arguments_or_with_many() -> None:
    assert stub_object(Pattern((), (Slot(abi.OWN, 0),), True), LAYOUT)
    assert stub_object(Pattern((Slot(abi.TENSOR, 4),) * 30, (Slot(abi.TENSOR, 2),), False), LAYOUT)


def test_the_text_has_no_addresses_of_the_process() -> None:
    text = stub_ir(Pattern(tuple(KINDS), (KINDS[1],), True), LAYOUT) + ENGINE
    assert not re.search(r"inttoptr \(i64 \d", text)
    assert all(abs(int(number)) < 1 << 12 for number in re.findall(r"i64 (-?\d{1,15})\b", text))


def test_layouts_are_constants_of_the_code() -> None:
    pattern = Pattern((Slot(abi.OWN, 1),), (Slot(abi.OWN, 1),), True)
    other = Layout(16, 24, 32, 40, 48, 56, 72, tensor=16)
    assert stub_ir(pattern, LAYOUT) != stub_ir(pattern, other)
    assert stub_object(pattern, LAYOUT) is stub_object(pattern, LAYOUT)


def test_python_is_not_called_between_reading_and_deciding() -> None:
    """What an array of ours is called is asked for before anything is read of any argument."""
    pattern = Pattern((Slot(abi.OWN, 1), Slot(abi.INTEGER), Slot(abi.OWN, 1)), (Slot(abi.OWN, 1),), True)
    read = body(stub_ir(pattern, LAYOUT), "read")
    assert read.count("@tilewright_array_form") == 3
    assert read.rindex("@tilewright_array_form") < read.index("PyLong_AsLongLong") < read.index("PyLong_AsUnsignedLongLong")


def test_nothing_is_handed_on_after_results_are_made() -> None:
    call = body(stub_ir(Pattern((Slot(abi.OWN, 1), Slot(abi.FLOAT)), (Slot(abi.OWN, 1),), False), LAYOUT), abi.CALL)
    made = call.index("\nmade:")
    before_refusal = call.index("\nreject:")
    assert "%reject" not in call[made:before_refusal]
    assert "%reject" in call[:made]


def test_only_results_must_be_writable_and_apart() -> None:
    readonly = f"i64 {LAYOUT.array_readonly}"
    new = stub_ir(Pattern((Slot(abi.OWN, 1),), (Slot(abi.OWN, 1),), False), LAYOUT)
    given = stub_ir(Pattern((Slot(abi.OWN, 1),), (Slot(abi.OWN, 1),), True), LAYOUT)
    assert body(new, "read").count(readonly) == 0 and f"@{abi.APART}(ptr %" not in body(new, abi.CALL)
    assert body(given, "read").count(readonly) == 1 and f"@{abi.APART}(ptr %" in body(given, abi.CALL)


def test_streams_of_torch_are_asked_for_where_there_are_tensors() -> None:
    asked = re.compile(r"call i32 %v\d+\(i32 %v\d+, ptr %stream\.at\)")
    own = body(stub_ir(Pattern((Slot(abi.OWN, 1),), (Slot(abi.OWN, 1),), False), LAYOUT), abi.CALL)
    mixed = body(stub_ir(Pattern((Slot(abi.OWN, 1), Slot(abi.TENSOR, 1)), (Slot(abi.OWN, 1),), False), LAYOUT), abi.CALL)
    assert not asked.search(own)
    assert asked.search(mixed)


def test_the_engine_lets_go_of_the_interpreter_for_the_launches_alone() -> None:
    assert engine_object()
    run = body(ENGINE, abi.RUN)
    save, restore = run.index("@PyEval_SaveThread"), run.index("@PyEval_RestoreThread")
    between = re.findall(r"@(\w+)\(", run[save:restore])
    assert set(between) == {"PyEval_SaveThread", "step"}
    step = re.findall(r"call \w+ (\S+?)\(", body(ENGINE, "step"))
    assert set(step) == {"%simple.launch", "@llvm.memcpy.p0.p0.i64", "%extended.launch"}
    assert "@tilewright_cuda_run" in optimised_ir(ENGINE, host_cpu(), opt=1)
