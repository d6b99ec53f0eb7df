"""Pass: vectors that are divided by the same number are multiplied with its reciprocal.

On a GPU that is done where only few bits of the quotients count (`narrow`), by one test of the divisor for all of a thread's
vectors. On a CPU the products are corrected, to the same bits:

    for … { %q = div %a, broadcast(%s) }
    ->  for … { %q = if every(%a and %s are neither tiny nor huge) { q = a * (1/s);  twice: q = (a - q s) (1/s) + q } else { div } }

In: a thread-stage kernel. (A CPU's division of a whole register takes as long as ten multiplications or more.) Out: the same
kernel with such divisions as above; LLVM takes the reciprocal and what is asked of the divisor out of the loop.

Why the bits are the same: 1/s is correctly rounded, so a * (1/s) is less than two units off, and the first correction,
computed from a remainder with a relative error of 2^-24, leaves less than one. From a quotient within one unit and a
correctly rounded reciprocal the second correction gives the correctly rounded quotient (Markstein), if nothing under- or
overflows on the way: the remainder's last bit lies 2 * mantissa bits below the dividend, and the bounds here leave room for
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tilewright.base.dtypes import DType, f16, f32, f64, u32, u64
from tilewright.base.record import record
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.rewrite import rewrite
from tilewright.ir.types import Vec, dtype_of


@record
class _QuotientFormat:
    bits: DType
    mantissa: int
    bias: int
    dividend: int
    """Dividends are between 2^-this and 2^this."""
    divisor: int


_MATRIX_OPS = frozenset({"wgmma", "mma"})
"""Kernels with these have no registers to spare for a branch around their results."""
SEVERAL = 16
"""Quotients of a GPU's thread that are worth an exact reciprocal and a branch."""
_FORMATS = {f32: _QuotientFormat(u32, f32.mantissa, 127, 100, 24), f64: _QuotientFormat(u64, f64.mantissa, 1023, 900, 60)}


def divide_by_reciprocal(kernel: Kernel, target: Target) -> Kernel:
    """The kernel with fewer divisions."""
    if not target.simt:
        return _divide_exactly(kernel, target) if _multiplies_and_adds(target) else kernel
    return kernel if any(op.opcode in _MATRIX_OPS for op in walk(kernel.body)) else _divide_roughly(kernel)


# -- where few bits count -------------------------------------------------------------------------------------------


def _divide_roughly(kernel: Kernel) -> Kernel:
    groups = {ops[0].results[0]: (by, ops) for by, ops in _groups(kernel.body, {})}
    if not groups:
        return kernel
    made: dict[Value, Value] = {}

    def divided(b: Builder, op: Op) -> Sequence[Value] | None:
        if op.opcode != "div":
            return None
        if op.results[0] in groups:
            by, ops = groups[op.results[0]]
            dividends = [made.get(o.operands[0], o.operands[0]) for o in ops]
            made.update(zip((o.results[0] for o in ops), _scaled(b, dividends, op.operands[1], by), strict=True))
        return [made[op.results[0]]] if op.results[0] in made else None

    return rewrite(kernel, divided)


def _groups(block: Block, scalars: dict[Value, Value]) -> Iterator[tuple[Value, list[Op]]]:
    """Divisions of one block by one scalar, of few bits each, whose dividends are all there at the first of them."""
    places: dict[Value, int] = {}
    found: dict[Value, tuple[int, list[Op]]] = {}
    for place, op in enumerate(block.ops):
        places.update((v, place) for v in op.results)
        if op.opcode == "broadcast" and isinstance(op.results[0].type, Vec):
            scalars[op.results[0]] = op.operands[0]
        few_bits = op.opcode == "div" and "narrow" in op.attrs and dtype_of(op.results[0].type) is f32
        if few_bits and op.operands[1] in scalars:
            first, ops = found.setdefault(scalars[op.operands[1]], (place, []))
            if places.get(op.operands[0], -1) < first and (not ops or ops[0].results[0].type == op.results[0].type):
                ops.append(op)
        for region in op.regions:
            yield from _groups(region, scalars)
    yield from ((by, ops) for by, (_, ops) in found.items() if sum(_width(op) for op in ops) >= SEVERAL)


def _width(op: Op) -> int:
    kind = op.results[0].type
    return kind.width if isinstance(kind, Vec) else 1


def _scaled(b: Builder, dividends: Sequence[Value], wide: Value, by: Value) -> tuple[Value, ...]:
    """All times the reciprocal, which keeps enough bits unless the divisor is denormal."""
    inverse = b.like(b.emit("div", [b.const(1.0, f32), by], {"narrow": f16})[0], wide)
    return b.if_(
        b.op("ge", b.op("abs", by), b.const(2.0**-126, f32)),
        lambda inner: [inner.mul(a, inverse) for a in dividends],
        lambda inner: [inner.emit("div", [a, wide], {"narrow": f16})[0] for a in dividends],
    )


# -- to the same bits -----------------------------------------------------------------------------------------------


def _multiplies_and_adds(target: Target) -> bool:
    """Whether a CPU has vectors that are multiplied and added without rounding between; where not, the correction would be calls of the C library."""
    return target.vector_bytes >= (32 if target.triple.startswith("x86_64") else 16)


def _divide_exactly(kernel: Kernel, target: Target) -> Kernel:
    found = {op.results[0]: by for op, by in _alike(kernel.body, 0, {}, {}) if _worthwhile(op, target)}
    if not found:
        return kernel

    def divided(b: Builder, op: Op) -> Sequence[Value] | None:
        by = found.get(op.results[0]) if op.opcode == "div" else None
        return None if by is None else _divided(b, op.operands[0], op.operands[1], by, target)

    return rewrite(kernel, divided)


def _worthwhile(op: Op, target: Target) -> bool:
    kind = op.results[0].type
    return isinstance(kind, Vec) and kind.dtype in _FORMATS and kind.width * kind.dtype.itemsize >= max(16, target.vector_bytes)


def _alike(block: Block, depth: int, depths: dict[Value, int], scalars: dict[Value, Value]) -> Iterator[tuple[Op, Value]]:
    """Divisions inside a loop, and the scalar from outside it that they divide by. `depths`: in how many loops a value is made."""
    depths.update((v, depth) for v in block.args)
    for op in block.ops:
        own = 0 if op.opcode == "const" else depth
        depths.update((v, own) for v in op.results)
        if op.opcode == "broadcast" and isinstance(op.results[0].type, Vec):
            scalars[op.results[0]] = op.operands[0]
        by = scalars.get(op.operands[1]) if op.opcode == "div" else None
        if by is not None and depths.get(by, 0) < depth:
            yield op, by
        for region in op.regions:
            yield from _alike(region, depth + (op.opcode in ("for", "while")), depths, scalars)


def _divided(b: Builder, a: Value, wide: Value, by: Value, target: Target) -> tuple[Value, ...]:
    dtype = dtype_of(a.type)
    form = _FORMATS[dtype]
    inverse = b.like(b.op("div", b.const(1.0, dtype), by), a)

    def corrected(inner: Builder) -> list[Value]:
        quotient = inner.mul(a, inverse)
        for _ in range(2):
            rest = inner.op("fma", inner.op("neg", quotient), wide, a)
            quotient = inner.op("fma", rest, inverse, quotient)
        return [quotient]

    plain = _beyond(b, by, form, form.divisor)
    far = _beyond(b, a, form, form.dividend)
    lanes = target.vector_bytes // dtype.itemsize
    while isinstance(far.type, Vec) and far.type.width > lanes:
        far = b.op("max", *b.multi("split", far))
    near = b.op("every", b.op("le", far, b.splat(_span(form, form.dividend), far)))
    near = b.logical_and(near, b.op("le", plain, b.splat(_span(form, form.divisor), plain)))
    return b.if_(near, corrected, lambda inner: [inner.op("div", a, wide)])


def _span(form: _QuotientFormat, limit: int) -> int:
    return 2 * limit << form.mantissa


def _beyond(b: Builder, value: Value, form: _QuotientFormat, limit: int) -> Value:
    """The bits of the magnitude above those of 2^-limit: at most `_span` from there to 2^limit, more (wrapped) for what is smaller, for
    infinities and NaN."""
    pattern = b.bitcast(value, form.bits)
    magnitude = b.op("and", pattern, b.splat((1 << form.bits.bits - 1) - 1, pattern))
    return b.sub(magnitude, b.splat((form.bias - limit) << form.mantissa, magnitude))
