"""What kernels tell the host -> LLVM text for NVIDIA GPUs: `print` by CUDA's `vprintf`, `assert` by a word of the host and a trap.

In: the op, the names of its operands and the writer of the function. `vprintf` takes a format and the numbers side by side in memory
as C's variable arguments: narrow integers as 32 bits, floats as doubles. A failed assertion says which it is, of which kernel, and in
which thread (`base.abi`), in the word that watchdogs report to. An index outside its array is left in the program's `$failure`
(`base.artifact`), and a flag of the host is raised.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.abi import ASSERT_BITS, ASSERT_MARK, WATCHDOG_SYMBOL
from tilewright.base.artifact import FAILURE_EXTENT, FAILURE_FLAG, FAILURE_INDEX
from tilewright.base.errors import TargetLimit
from tilewright.base.target import Target
from tilewright.codegen.llvm.emitter import FunctionWriter
from tilewright.codegen.llvm.printf import promoted, text_constant
from tilewright.ir.needs import assertions
from tilewright.ir.nodes import Op
from tilewright.ir.types import dtype_of

_SPACE = " addrspace(1)"
"""Texts lie in global memory."""
_FENCE = 'call void asm sideeffect "fence.sc.sys;", "~{memory}"()'


def print_text(w: FunctionWriter, op: Op, operands: Sequence[str], target: Target) -> Sequence[str]:
    from tilewright.ir.printing import pieces, printf_format

    dtypes = [dtype_of(v.type) for v in op.operands]
    format_ = text_constant(w, printf_format(pieces(str(op.attrs["text"]), dtypes)), _SPACE)
    numbers = [promoted(w, value, dtype, _SPACE) for value, dtype in zip(operands, dtypes, strict=True)]
    buffer = "null"
    if numbers:
        kind = "{ " + ", ".join(t for t, _ in numbers) + " }"
        buffer = w.fresh("arguments")
        w.first.append(f"  {buffer} = alloca {kind}, align 8")
        for position, (type_, value) in enumerate(numbers):
            place = w.let(f"getelementptr inbounds {kind}, ptr {buffer}, i32 0, i32 {position}")
            w.line(f"store {type_} {value}, ptr {place}")
    w.call("i32", "vprintf", ("ptr", format_), ("ptr", buffer))
    return []


def assert_true(w: FunctionWriter, op: Op, operands: Sequence[str], target: Target) -> Sequence[str]:
    number = w.kernel.attrs.get("watchdog_number", 0)
    ordinal = next(k for k, one in enumerate(assertions(w.kernel)) if one is op)
    blocks, threads, ordinals, kernels = ASSERT_BITS
    assert isinstance(number, int)
    if ordinal >> ordinals or number >> kernels:
        raise TargetLimit.at(
            "TW020",
            f"more than {1 << ordinals} assertions in a kernel, or kernels with assertions beyond {1 << kernels}",
            op.span,
        )
    w.declarations.add(f"@{WATCHDOG_SYMBOL} = addrspace(1) externally_initialized global ptr null, align 8")
    failed, held = w.new_label("failed"), w.new_label("held")
    w.line(f"br i1 {operands[0]}, label %{held}, label %{failed}")
    w.open_label(failed)
    fixed = ASSERT_MARK | number << (blocks + threads + ordinals) | ordinal << (blocks + threads)
    thread = w.let(f"zext i32 {w.call('i32', 'llvm.nvvm.read.ptx.sreg.tid.x')} to i64")
    block = w.let(f"and i64 {_block(w)}, {(1 << blocks) - 1}")
    word = w.let(f"or i64 {w.let(f'shl i64 {thread}, {blocks}')}, {block}")
    word = w.let(f"or i64 {word}, {fixed - (1 << 64)}")
    place = w.let(f"load volatile ptr, ptr addrspace(1) @{WATCHDOG_SYMBOL}")
    w.line(f"store volatile i64 {word}, ptr {place}")
    w.line(_FENCE)
    w.call("void", "llvm.trap", attributes=" noreturn")
    w.line("unreachable")
    w.open_label(held)
    return []


def report_index(w: FunctionWriter, op: Op, operands: Sequence[str], target: Target) -> Sequence[str]:
    """Leave site, index and extent, if nobody has since the host last looked, and raise the flag. The thread goes on."""
    cell, index, extent = operands
    space, site = "ptr addrspace(1)", int(str(op.attrs["site"]))
    tried = w.let(f"cmpxchg {space} {cell}, i64 0, i64 {-site} syncscope(\"device\") monotonic monotonic")
    first, flagged, after = w.new_label("first"), w.new_label("flagged"), w.new_label("after")
    w.line(f"br i1 {w.let(f'extractvalue {{ i64, i1 }} {tried}, 1')}, label %{first}, label %{after}")
    w.open_label(first)
    places = {field: w.let(f"getelementptr i64, {space} {cell}, i64 {field}") for field in (FAILURE_INDEX, FAILURE_EXTENT, FAILURE_FLAG)}
    w.line(f"store volatile i64 {index}, {space} {places[FAILURE_INDEX]}, align 8")
    w.line(f"store volatile i64 {extent}, {space} {places[FAILURE_EXTENT]}, align 8")
    # Who sees the site sees the rest, and who sees the flag sees the site.
    w.line(_FENCE)
    w.line(f"store volatile i64 {site}, {space} {cell}, align 8")
    w.line(_FENCE)
    flag = w.let(f"load volatile ptr, {space} {places[FAILURE_FLAG]}, align 8")
    w.line(f"br i1 {w.let(f'icmp eq ptr {flag}, null')}, label %{after}, label %{flagged}")
    w.open_label(flagged)
    w.line(f"store volatile i64 1, ptr {flag}, align 8")
    w.line(f"br label %{after}")
    w.open_label(after)
    return []


def _block(w: FunctionWriter) -> str:
    """The block's linear number, x fastest."""
    x, y, z, wide, high = (
        w.let(f"zext i32 {w.call('i32', f'llvm.nvvm.read.ptx.sreg.{name}')} to i64")
        for name in ("ctaid.x", "ctaid.y", "ctaid.z", "nctaid.x", "nctaid.y")
    )
    row = w.let(f"add i64 {y}, {w.let(f'mul i64 {z}, {high}')}")
    return w.let(f"add i64 {x}, {w.let(f'mul i64 {row}, {wide}')}")
