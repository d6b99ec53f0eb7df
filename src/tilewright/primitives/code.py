"""Writing thread-stage kernels as Python expressions: what the primitives are built with.

In: the name, threads, grid and parameters of a kernel, and a function that writes its body. Out: a `Kernel` at the thread stage.
`Code` appends ops to the innermost open region; `Num` is a number of the kernel, with Python's operators (a Python number takes
the other operand's dtype); `Mem` is a tensor. Nothing here knows a device.

    def body(c: Code, x: Mem, y: Mem) -> None:
        i = c.block() * 256 + c.thread()
        c.when(i < c.size("n"), lambda: y.store(i, x[i] * 2))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

from tilewright.base.dtypes import DType, i64, u32, u64
from tilewright.base.sizes import Size
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Attr, Block, Kernel, Op, Stage, Value
from tilewright.ir.types import Tensor, Type, Vec, dtype_of


class Num:
    """A number, or a short vector of them, in a thread's registers."""

    __slots__ = ("code", "value")

    def __init__(self, code: Code, value: Value) -> None:
        self.code, self.value = code, value

    @property
    def dtype(self) -> DType:
        return dtype_of(self.value.type)

    @property
    def width(self) -> int:
        return self.value.type.width if isinstance(self.value.type, Vec) else 1

    def __add__(self, other: Any) -> Num:
        return self.code.binary("add", self, other)

    def __sub__(self, other: Any) -> Num:
        return self.code.binary("sub", self, other)

    def __rsub__(self, other: Any) -> Num:
        return self.code.binary("sub", self.code.like(other, self), self)

    def __mul__(self, other: Any) -> Num:
        return self.code.binary("mul", self, other)

    def __floordiv__(self, other: Any) -> Num:
        return self.code.binary("floordiv", self, other)

    def __mod__(self, other: Any) -> Num:
        return self.code.binary("mod", self, other)

    def __and__(self, other: Any) -> Num:
        return self.code.binary("and", self, other)

    def __or__(self, other: Any) -> Num:
        return self.code.binary("or", self, other)

    def __xor__(self, other: Any) -> Num:
        return self.code.binary("xor", self, other)

    def __lshift__(self, other: Any) -> Num:
        return self.code.binary("shl", self, other)

    def __rshift__(self, other: Any) -> Num:
        return self.code.binary("shr", self, other)

    def __lt__(self, other: Any) -> Num:
        return self.code.binary("lt", self, other)

    def __le__(self, other: Any) -> Num:
        return self.code.binary("le", self, other)

    def __gt__(self, other: Any) -> Num:
        return self.code.binary("gt", self, other)

    def __ge__(self, other: Any) -> Num:
        return self.code.binary("ge", self, other)

    def eq(self, other: Any) -> Num:
        return self.code.binary("eq", self, other)

    def ne(self, other: Any) -> Num:
        return self.code.binary("ne", self, other)

    def __invert__(self) -> Num:
        return self.code.op("not", self)

    def to(self, dtype: DType) -> Num:
        return self if self.dtype is dtype else self.code.op("cast", self, dtype=dtype)

    def bits(self, dtype: DType) -> Num:
        return self if self.dtype is dtype else self.code.op("bitcast", self, dtype=dtype)

    def lanes(self) -> list[Num]:
        """The elements of a vec, or the number itself."""
        if self.width == 1:
            return [self]
        return [self.code.op("extract", self, lane=lane) for lane in range(self.width)]

    def min(self, other: Any) -> Num:
        return self.code.binary("min", self, other)

    def max(self, other: Any) -> Num:
        return self.code.binary("max", self, other)


class Mem:
    """A tensor: a parameter of the kernel, or memory it has for itself."""

    __slots__ = ("code", "value")

    def __init__(self, code: Code, value: Value) -> None:
        self.code, self.value = code, value

    @property
    def dtype(self) -> DType:
        return dtype_of(self.value.type)

    def _place(self, index: Any) -> list[Value]:
        several = index if isinstance(index, tuple) else (index,)
        return [self.code.index(i).value for i in several]

    def __getitem__(self, index: Any) -> Num:
        return self.load(index)

    def load(self, index: Any, width: int = 1, **attrs: Attr) -> Num:
        if width > 1:
            attrs["width"] = width
        return Num(self.code, self.code.b.emit("load", [self.value, *self._place(index)], attrs)[0])

    def store(self, index: Any, value: Any, **attrs: Attr) -> None:
        number = value if isinstance(value, Num) else self.code.const(value, self.dtype)
        self.code.b.emit("store", [self.value, *self._place(index), number.value], attrs)

    def atomic(self, kind: str, index: Any, *values: Any, scope: str = "device", order: str = "relaxed") -> Num:
        """The old value."""
        operands = [(v if isinstance(v, Num) else self.code.const(v, self.dtype)).value for v in values]
        result = self.code.b.op("atomic", self.value, *self._place(index), *operands, kind=kind, scope=scope, order=order)
        return Num(self.code, result)


def mask_word(warp_size: int) -> DType:
    """A word with a bit for each lane of a warp."""
    return u64 if warp_size > u32.bits else u32


def mask_bits(warp_size: int) -> dict[str, Attr]:
    """What an op says whose result is such a word, where that has not 32 bits."""
    return {} if mask_word(warp_size) is u32 else {"bits": u64.bits}


class Code:
    """The body of a kernel while it is written."""

    def __init__(self) -> None:
        self._open = [Builder()]

    @property
    def b(self) -> Builder:
        """Where the next op goes."""
        return self._open[-1]

    # -- numbers ------------------------------------------------------------------------------------------------

    def const(self, value: int | float | bool, dtype: DType) -> Num:
        if dtype.is_int:
            # Patterns of bits may be given as signed or unsigned numbers.
            span = 1 << dtype.bits
            value = int(value) % span
            value = value - span if value > dtype.max_value else value
        return Num(self, self.b.const(value, dtype))

    def like(self, value: Any, other: Num) -> Num:
        """`value` with the dtype and width of `other`."""
        number = value if isinstance(value, Num) else self.const(value, other.dtype)
        if other.width > number.width:
            return self.op("broadcast", number, width=other.width)
        return number

    def index(self, value: Any) -> Num:
        """An index into a tensor."""
        if isinstance(value, Num):
            return value.to(i64)
        return Num(self, self.b.index(value))

    def op(self, opcode: str, *operands: Num, **attrs: Attr) -> Num:
        return self.multi(opcode, *operands, **attrs)[0]

    def multi(self, opcode: str, *operands: Num, **attrs: Attr) -> list[Num]:
        return [Num(self, v) for v in self.b.emit(opcode, [o.value for o in operands], attrs)]

    def binary(self, opcode: str, a: Num, b: Any) -> Num:
        other = self.like(b, a)
        return self.op(opcode, self.like(a, other), other)

    def select(self, cond: Num, a: Any, b: Any) -> Num:
        first = self.like(a, b) if isinstance(b, Num) else a
        return self.op("select", cond, first, self.like(b, first))

    def pack(self, values: Sequence[Num]) -> Num:
        return values[0] if len(values) == 1 else self.op("pack", *values)

    def size(self, size: Size | str) -> Num:
        return Num(self, self.b.index(Size.of(size)))

    # -- where we are -------------------------------------------------------------------------------------------

    def thread(self) -> Num:
        return self.op("thread_id")

    def block(self, axis: int = 0) -> Num:
        return self.op("program_id", axis=axis)

    def blocks(self, axis: int = 0) -> Num:
        return self.op("grid_size", axis=axis)

    # -- memory and meetings ------------------------------------------------------------------------------------

    def shared(self, dtype: DType, *shape: int, align: int = 0) -> Mem:
        return self.alloc("shared", dtype, *shape, align=align)

    def alloc(self, space: str, dtype: DType, *shape: int, align: int = 0) -> Mem:
        attrs: dict[str, Attr] = {"space": space, "dtype": dtype, "shape": shape}
        if align:
            attrs["align"] = align
        return Mem(self, self.b.emit("alloc", [], attrs)[0])

    def barrier(self) -> None:
        self.b.multi("barrier")

    def warp_sync(self) -> None:
        self.b.multi("warp_sync")

    def shuffle(self, value: Num, lane: Any, mode: str = "idx") -> Num:
        other = lane if isinstance(lane, Num) else self.const(lane, u32)
        return self.op("shuffle", value, other, mode=mode)

    def ballot(self, value: Num, warp_size: int) -> Num:
        """A bit for each lane of the warp: whether it holds there."""
        return self.op("vote", value, mode="ballot", **mask_bits(warp_size))

    def any(self, value: Num) -> Num:
        return self.op("vote", value, mode="any")

    # -- control ------------------------------------------------------------------------------------------------

    def region(self, types: Sequence[Type], body: Callable[..., Sequence[Num] | Num | None]) -> Block:
        """A region whose arguments `body` takes and whose results it gives."""
        args = tuple(Value(t) for t in types)
        self._open.append(Builder())
        try:
            results = body(*(Num(self, a) for a in args))
            given = [] if results is None else [results] if isinstance(results, Num) else list(results)
            self.b.multi("yield", *(r.value for r in given))
            return Block(args, tuple(self.b.ops))
        finally:
            self._open.pop()

    def _structured(self, opcode: str, operands: Sequence[Num], types: Sequence[Type], regions: Sequence[Block], **attrs: Attr) -> list[Num]:
        results = tuple(Value(t) for t in types)
        self.b.append(Op(opcode, tuple(o.value for o in operands), results, MappingProxyType(attrs), tuple(regions)))
        return [Num(self, r) for r in results]

    def when(self, cond: Num, then: Callable[[], None]) -> None:
        """Do it where the condition holds."""
        self._structured("if", [cond], [], [self.region([], lambda: then()), self.region([], lambda: None)])

    def either(
        self, cond: Num, then: Callable[[], Sequence[Num] | Num | None], otherwise: Callable[[], Sequence[Num] | Num | None]
    ) -> list[Num]:
        """The values of the one or the other."""
        first = self.region([], then)
        second = self.region([], otherwise)
        return self._structured("if", [cond], [v.type for v in first.yields], [first, second])

    def loop(
        self, low: Any, high: Any, step: Any, init: Sequence[Num], body: Callable[..., Sequence[Num] | Num | None], **attrs: Attr
    ) -> list[Num]:
        """`body(i, *carried)` gives the next carried values; the last ones come out."""
        first = low if isinstance(low, Num) else self.index(low)
        bounds = [first, *(v if isinstance(v, Num) else self.const(v, first.dtype) for v in (high, step))]
        types = [v.value.type for v in init]
        block = self.region([first.value.type, *types], body)
        return self._structured("for", [*bounds, *init], types, [block], **attrs)

    def loop_while(
        self, init: Sequence[Num], cond: Callable[..., Num], body: Callable[..., Sequence[Num]]
    ) -> list[Num]:
        """`body(*carried)` gives the next values as long as `cond(*carried)` holds."""
        types = [v.value.type for v in init]
        first = self.region(types, lambda *carried: [cond(*carried), *carried])
        return self._structured("while", list(init), types, [first, self.region(types, body)])


Param = tuple[str, Type]


def write_kernel(
    name: str, threads: int, grid: Sequence[Size | int], params: Sequence[Param], body: Callable[..., None], **attrs: Attr
) -> Kernel:
    """The kernel whose body `body(code, *params)` writes."""
    values = tuple(Value(type_, label) for label, type_ in params)
    code = Code()
    body(code, *(Mem(code, v) if isinstance(v.type, Tensor) else Num(code, v) for v in values))
    sizes = tuple(Size.of(g) for g in grid)
    return Kernel(name, Stage.THREAD, values, Block((), tuple(code.b.ops)), sizes, threads, attrs=MappingProxyType(attrs))
