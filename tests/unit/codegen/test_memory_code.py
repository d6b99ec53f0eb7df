"""The machine code for device memory: it compiles for every kind of CPU, and nothing but the interpreter decides its offsets."""

from __future__ import annotations

import pytest

from tilewright.base import memory_abi
from tilewright.base.target import parse_target
from tilewright.codegen.host import interpreter
from tilewright.codegen.host.allocator import memory_ir, memory_object

FUNCTIONS = ("take", "make", "wrap", "give", "swap", "push", "add", "hold", "find", "move")


@pytest.mark.parametrize("target", ["x86-64", "x86-64-avx512", "aarch64-neon"])
def test_compiles(target: str) -> None:
    found = memory_object(parse_target(target))
    assert found[:4] == b"\x7fELF"
    for name in FUNCTIONS:
        assert f"tilewright_memory_{name}\0".encode() in found


def test_slots_are_in_the_order_of_their_names() -> None:
    for slots in (memory_abi.BLOCK_SLOTS, memory_abi.ARRAY_SLOTS):
        assert tuple(sorted(slots)) == slots
    assert memory_abi.slot(memory_abi.BLOCK_SLOTS, memory_abi.BLOCK_SLOTS[0], interpreter.HEADER) == interpreter.HEADER


def test_no_addresses_of_this_process() -> None:
    text = memory_ir()
    assert text == memory_ir()
    assert "inttoptr i64 %" in text
    assert all(not part.lstrip().startswith(tuple("123456789")) for part in text.split("inttoptr i64")[1:])
