"""Copies between strided arrays on one device. In: two arrays of one shape and dtype; out: launches of a small PTX kernel.

Axes that both arrays walk as one are joined and the order of axes is that of the target's memory, so most copies have one or two
axes. Rows that are whole 16 (8, 4, 2) bytes move in such pieces. A stride of 0 repeats an element, which is how arrays are
broadcast and filled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tilewright.base.artifact import ArrayParam, Artifact, Launch, ScalarParam
from tilewright.base.dtypes import i64, u8
from tilewright.base.errors import UserError
from tilewright.base.sizes import Size, ceildiv

if TYPE_CHECKING:
    from tilewright.runtime.cuda.context import CudaContext

MOST_AXES = 8
_THREADS = 256
_NARROW = 1 << 31

_MOVES = {
    1: ("u8", "%h0", "%h0"), 2: ("u16", "%h0", "%h0"), 4: ("u32", "%r0", "%r0"), 8: ("u64", "%w0", "%w0"),
    16: ("v2.u64", "{%w0, %w1}", "{%w0, %w1}"),
}  # fmt: skip

Axis = tuple[int, int, int]
"""Extent, and strides of source and target in bytes."""


def joined(shape: Sequence[int], source: Sequence[int], target: Sequence[int]) -> list[Axis]:
    """Axes without those of extent one, ordered by the target's memory, neighbours that both walk as one joined."""
    axes = [axis for axis in zip(shape, source, target, strict=True) if axis[0] != 1]
    axes.sort(key=lambda axis: (-abs(axis[2]), -abs(axis[1])))
    found: list[Axis] = []
    for extent, step, stride in axes:
        if found and found[-1][1] == step * extent and found[-1][2] == stride * extent:
            found[-1] = (found[-1][0] * extent, step, stride)
        else:
            found.append((extent, step, stride))
    return found or [(1, 0, 0)]


def widened(axes: list[Axis], itemsize: int, alignment: int) -> tuple[list[Axis], int]:
    """Larger pieces where rows are contiguous on both sides and all addresses are multiples of them."""
    extent, step, stride = axes[-1]
    for width in (16, 8, 4, 2):
        outer = [number for axis in axes[:-1] for number in axis[1:]]
        if width <= itemsize or step != itemsize or stride != itemsize:
            continue
        if extent * itemsize % width == 0 and all(number % width == 0 for number in (*outer, alignment)):
            return [*axes[:-1], (extent * itemsize // width, width, width)], width
    return axes, itemsize


def copy_ptx(width: int, rank: int, wide: bool) -> str:
    """The kernel for pieces of `width` bytes and `rank` axes, the first of which needs no division; `wide`: 64-bit indices."""
    kind, value, stored = _MOVES[width]
    word = "u64" if wide else "u32"
    index, part, rest = ("%w2", "%w3", "%w4") if wide else ("%r1", "%r2", "%r3")
    parameters = ", ".join(
        [".param .u64 source", ".param .u64 target", ".param .u64 count"]
        + [f".param .u64 {name}{axis}" for axis in range(rank) for name in ("extent", "from", "to")]
    )
    lines = [
        ".version 7.0", ".target sm_70", ".address_size 64",
        f".visible .entry {entry_name(width, rank, wide)}({parameters}) {{",
        "  .reg .pred %p0; .reg .b16 %h0; .reg .b32 %r<8>; .reg .b64 %w<16>;",
        "  ld.param.u64 %w5, [source]; ld.param.u64 %w6, [target]; ld.param.u64 %w7, [count];",
        "  mov.u32 %r4, %ctaid.x; mov.u32 %r5, %ntid.x; mov.u32 %r6, %tid.x; mul.wide.u32 %w8, %r4, %r5;",
        "  cvt.u64.u32 %w9, %r6; add.u64 %w8, %w8, %w9; setp.ge.u64 %p0, %w8, %w7; @%p0 bra done;",
        f"  {'mov.u64' if wide else 'cvt.u32.u64'} {index}, %w8;",
    ]  # fmt: skip
    for axis in reversed(range(rank)):
        lines.append(f"  ld.param.u64 %w10, [from{axis}]; ld.param.u64 %w11, [to{axis}];")
        if axis:
            load = "ld.param.u64 %w12, [extent{0}];" if wide else "ld.param.u32 %r7, [extent{0}];"
            extent = "%w12" if wide else "%r7"
            lines.append(f"  {load.format(axis)} div.{word} {part}, {index}, {extent};")
            lines.append(f"  mul.lo.{word} {rest}, {part}, {extent}; sub.{word} {rest}, {index}, {rest};")
            lines.append(f"  mov.{word} {index}, {part};")
        else:
            lines.append(f"  mov.{word} {rest}, {index};")
        lines.append(f"  {'mov.u64' if wide else 'cvt.u64.u32'} %w13, {rest};")
        lines.append("  mad.lo.s64 %w5, %w13, %w10, %w5; mad.lo.s64 %w6, %w13, %w11, %w6;")
    lines += [f"  ld.global.{kind} {value}, [%w5]; st.global.{kind} [%w6], {stored};", "done:", "  ret;", "}"]
    return "\n".join(lines) + "\n"


def entry_name(width: int, rank: int, wide: bool) -> str:
    return f"tilewright_copy_{width}_{rank}{'_wide' if wide else ''}"


def copy_artifact(width: int, rank: int, wide: bool) -> Artifact:
    """The kernel as a program: numbers come as scalars, addresses as arrays of bytes."""
    count = Size.of("count")
    scalars = [f"{name}{axis}" for axis in range(rank) for name in ("extent", "from", "to")]
    arrays = tuple(ArrayParam(name, u8, (count,), (Size.of(1),), "input") for name in ("source", "target"))
    inputs: tuple[ArrayParam | ScalarParam, ...] = (*arrays, *(ScalarParam(name, i64) for name in ("count", *scalars)))
    name = entry_name(width, rank, wide)
    launch = Launch(name, ("source", "target", "count", *scalars), (), (ceildiv(count, _THREADS),), _THREADS)
    return Artifact(name, "sm_70", "ptx", copy_ptx(width, rank, wide).encode(), inputs, (), (), (launch,), (), ())


def copy_strided(
    device: CudaContext,
    itemsize: int,
    shape: Sequence[int],
    source: tuple[int, Sequence[int]],
    target: tuple[int, Sequence[int]],
    stream: int,
) -> None:
    """Copy elements on `stream`. `source` and `target` are an address and strides in elements; they do not overlap."""
    unit = 2 if itemsize % 2 == 0 and itemsize not in _MOVES else 1
    if itemsize not in _MOVES:
        # Packed blocks have odd sizes: their bytes are one more axis.
        shape = (*shape, itemsize // unit)
        source = (source[0], (*(s * itemsize // unit for s in source[1]), 1))
        target = (target[0], (*(s * itemsize // unit for s in target[1]), 1))
        itemsize = unit
    steps, strides = ([s * itemsize for s in side[1]] for side in (source, target))
    axes, width = widened(joined(shape, steps, strides), itemsize, source[0] | target[0])
    if len(axes) > MOST_AXES:
        raise UserError.at("TW003", f"a copy between strided arrays of {len(axes)} axes; at most {MOST_AXES} are possible")
    count = 1
    for extent, _, _ in axes:
        count *= extent
    if not count:
        return
    program = device.copy_program(width, len(axes), count >= _NARROW)
    scalars: dict[str, int | float | bool] = {"count": count}
    for number, (extent, step, stride) in enumerate(axes):
        scalars.update({f"extent{number}": extent, f"from{number}": step, f"to{number}": stride})
    program.run({"source": source[0], "target": target[0]}, scalars, {"count": count}, stream)
