"""Explicit SIMD values in compiled functions: `f32x4` and the like, arithmetic on them, their lanes.

In: operators, words and methods with a `Simd` among their operands. Out: `Simd`s, or numbers for lanes and sums of lanes. Both operands have
one type; a single number beside a register is repeated to all its lanes.

    f32x4(0.0), f32x4(a, b, c, d)                 one number in all lanes, or one for each
    f32x4.load(x, i), v.store(x, i)               neighbouring elements of an array, from index i on
    + - * / // % & | ^ << >> ~, comparisons       lane by lane; a comparison gives a mask
    tw.fma, tw.where, tw.sqrt, min, max, abs, …   functions, lane by lane
    v[2], v.insert(2, a), v.shuffle(3, 2, 1, 0)   lanes: one, another one there, in another order (of v and w with v.shuffle(…, other=w))
    v.sum(), v.min(), v.max(), m.any(), m.all()   all lanes combined
    v.cast(f32x4.dtype), tw.bitcast(v, tw.u32)    other dtypes
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping

from tilewright.base.dtypes import DType, i64
from tilewright.base.simd import TYPES, SimdType, mask_of, simd_type
from tilewright.frontend.simt.build import Emitter, arguments
from tilewright.frontend.simt.numbers import as_dtype
from tilewright.frontend.simt.values import (
    NOTHING,
    Arguments,
    MemoryValue,
    Method,
    NumberValue,
    Seq,
    Simd,
    Val,
    WordValue,
    describe,
)
from tilewright.frontend.simt.words import CALLS, VALUES
from tilewright.ir.nodes import Value
from tilewright.ir.ops import OPS
from tilewright.ir.types import Vec

OWN = frozenset({*TYPES, *(f"{name}.load" for name in TYPES)})
"""Words that take registers, or numbers for them, themselves."""
_ARITHMETIC = {"+": "add", "-": "sub", "*": "mul", "/": "div", "//": "floordiv", "%": "mod"}
_BITS = {"&": "and", "|": "or", "^": "xor", "<<": "shl", ">>": "shr"}
_COMPARE = {ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge"}
_FOLDS = {"sum": "add", "min": "min", "max": "max", "product": "mul"}


# -- registers --------------------------------------------------------------------------------------------------------


def made(value: Value) -> Simd:
    """The SIMD value of a vec."""
    assert isinstance(value.type, Vec)
    return Simd(simd_type(value.type.dtype, value.type.width), NumberValue(value.type.dtype, "", value))


def vec(value: Simd) -> Value:
    assert value.lanes.value is not None
    return value.lanes.value


def _splat(e: Emitter, val: Val, kind: SimdType, what: str) -> Value:
    """A register of that type: one of it, or a number in all lanes."""
    if isinstance(val, Simd):
        if val.kind is not kind:
            raise e.fail(f"{what} is {describe(val)} where {kind.__name__} is wanted", "convert it: v.cast(tw.f32), or use one width", "TW009")
        return vec(val)
    number = e.convert(e.number(val, what), kind.dtype, what)
    return e.b.op("broadcast", e.use(number, kind.dtype), width=kind.width)


def _construct(kind: SimdType) -> Callable[[Emitter, Arguments], Val]:
    def construct(e: Emitter, given: Arguments) -> Val:
        items = given.items
        if len(items) == 1 and isinstance(items[0], Seq):
            items = items[0].items
        if given.named or len(items) not in (1, kind.width):
            raise e.fail(f"{kind.__name__} takes one number, or {kind.width}, got {len(items) + len(given.named)}", code="TW016")
        if len(items) == 1:
            return made(_splat(e, items[0], kind, "the number"))
        numbers = [e.convert(e.number(item, f"lane {lane}"), kind.dtype, f"lane {lane}") for lane, item in enumerate(items)]
        return made(e.b.op("pack", *(e.use(n, kind.dtype) for n in numbers)))

    return construct


def _load(kind: SimdType) -> Callable[[Emitter, Arguments], Val]:
    def load(e: Emitter, given: Arguments) -> Val:
        word = f"{kind.__name__}.load"
        memory, places = _access(e, given, word)
        if memory.type.dtype is not kind.dtype:
            raise e.fail(f"'{memory.name}' holds {memory.type.dtype}, not {kind.dtype}", f"load tw.{memory.type.dtype}x{kind.width}", "TW009")
        return made(e.b.op("load", memory.value, *places, width=kind.width, unaligned=True))

    return load


def _access(e: Emitter, given: Arguments, word: str) -> tuple[MemoryValue, tuple[Value, ...]]:
    """The array and the place of the first element."""
    if given.named or not given.items:
        raise e.fail(f"{word} takes an array and its indices", code="TW016")
    memory = e.memory(given.items[0], "the first argument")
    places = e.place(memory, list(given.items[1:]))
    step = memory.type.strides[-1].constant if memory.type.rank else None
    if step != 1:
        raise e.fail(f"'{memory.name}' may not have its elements one after another", f"pass a contiguous array: np.ascontiguousarray({memory.name})", "TW009")
    return memory, places


for _name, _kind in TYPES.items():
    CALLS[_name] = _construct(_kind)
    CALLS[f"{_name}.load"] = _load(_kind)
    VALUES[f"{_name}.load"] = lambda e, word=f"{_name}.load": WordValue(word)  # type: ignore[misc]
    VALUES[f"{_name}.width"] = lambda e, width=_kind.width: NumberValue(i64, "int", None, width)  # type: ignore[misc]


# -- operators --------------------------------------------------------------------------------------------------------


def binary(e: Emitter, sign: str, left: Val, right: Val) -> Val:
    kind = _common(e, sign, left, right)
    opcode = _ARITHMETIC.get(sign) or _BITS.get(sign)
    if opcode is None or (sign in _BITS and kind.dtype.is_float) or (sign in _ARITHMETIC and kind.dtype.is_bool):
        raise e.fail(f"'{sign}' does not take {kind.__name__}", code="TW009")
    if sign == "/" and not kind.dtype.is_float:
        raise e.fail(f"'/' of {kind.__name__} would give floats", "use //, or convert with v.cast(tw.f32)", "TW009")
    return made(e.b.op(opcode, _splat(e, left, kind, "an operand"), _splat(e, right, kind, "an operand")))


def _common(e: Emitter, what: str, *values: Val) -> SimdType:
    kinds = dict.fromkeys(v.kind for v in values if isinstance(v, Simd))
    if len(kinds) > 1:
        shown = " and ".join(k.__name__ for k in kinds)
        raise e.fail(f"'{what}' of {shown}", "convert one of them: v.cast(tw.f32), or use one width", "TW009")
    return next(iter(kinds))


def unary(e: Emitter, kind: type[ast.unaryop], operand: Simd) -> Val:
    dtype = operand.kind.dtype
    if kind is ast.UAdd:
        return operand
    if kind is ast.Not or (kind is ast.USub and dtype.is_bool) or (kind is ast.Invert and dtype.is_float):
        raise e.fail(f"{describe(operand)} has no such sign", "negate a mask with ~", "TW009")
    return made(e.b.op("neg" if kind is ast.USub else "not", vec(operand)))


def comparison(e: Emitter, node: ast.Compare, variables: Mapping[str, Val], read: Callable[[ast.expr], Val]) -> Val | None:
    """A comparison with a register on one side; None, and nothing read, where no name in it can be one."""
    if len(node.ops) != 1 or type(node.ops[0]) not in _COMPARE or not any(_may_be_simd(n, variables) for n in (node.left, *node.comparators)):
        return None
    with e.inside() as inner:
        left, right = read(node.left), read(node.comparators[0])
    if not isinstance(left, Simd) and not isinstance(right, Simd):
        return None
    e.b.ops += inner.ops
    kind = _common(e, "a comparison", left, right)
    return made(e.b.op(_COMPARE[type(node.ops[0])], _splat(e, left, kind, "an operand"), _splat(e, right, kind, "an operand")))


def _may_be_simd(node: ast.expr, variables: Mapping[str, Val]) -> bool:
    """Whether a variable that holds a register, or a word for one, stands in the expression."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and isinstance(variables.get(inner.id), Simd):
            return True
        if (isinstance(inner, ast.Attribute) and inner.attr in TYPES) or (isinstance(inner, ast.Name) and inner.id in TYPES):
            return True
    return False


# -- functions --------------------------------------------------------------------------------------------------------


def call(e: Emitter, name: str, given: Arguments) -> Val:
    """A function of Tilewright, of `math` or of Python on registers."""
    if given.named:
        raise e.fail(f"tilewright.{name} of registers takes no named arguments", code="TW016")
    items = given.items
    if name == "where":
        return _where(e, items)
    if name == "bitcast":
        return _bitcast(e, items)
    opcode = {"maximum": "max", "minimum": "min"}.get(name, name)
    row = OPS.get(opcode)
    if row is None or row.group not in ("elementwise", "function", "bits") or opcode in ("cast", "bitcast", "select"):
        raise e.fail(f"tilewright.{name} does not take {describe(next(i for i in items if isinstance(i, Simd)))}", code="TW009")
    kind = _common(e, name, *items)
    values = [_splat(e, item, kind, f"an argument of {name}") for item in items]
    if opcode in ("min", "max"):
        result = values[0]
        for other in values[1:]:
            result = e.b.op(opcode, result, other)
        return made(result)
    wanted = {"fma": 3, "pow": 2, "mod": 2, "floordiv": 2, "hypot": 2}.get(opcode, 1)
    if len(values) != wanted:
        raise e.fail(f"tilewright.{name} takes {wanted} argument(s), got {len(values)}", code="TW016")
    if row.group == "function" and not kind.dtype.is_float:
        raise e.fail(f"tilewright.{name} takes floats, got {kind.__name__}", "convert with v.cast(tw.f32)", "TW009")
    return made(e.b.op(opcode, *values))


def _where(e: Emitter, items: tuple[Val, ...]) -> Val:
    if len(items) != 3:
        raise e.fail(f"tilewright.where takes 3 arguments, got {len(items)}", code="TW016")
    condition, a, b = items
    kind = _common(e, "where", a, b) if isinstance(a, Simd) or isinstance(b, Simd) else None
    if kind is None:
        raise e.fail("tilewright.where with a mask chooses between registers", "write for instance tw.where(m, v, tw.f32x4(0.0))", "TW009")
    if isinstance(condition, Simd) and condition.kind is not mask_of(kind):
        raise e.fail(f"the condition is {describe(condition)}, not a mask of {kind.width} lanes", code="TW009")
    test = vec(condition) if isinstance(condition, Simd) else e.use(e.truth(condition))
    return made(e.b.select(test, _splat(e, a, kind, "a value"), _splat(e, b, kind, "a value")))


def _bitcast(e: Emitter, items: tuple[Val, ...]) -> Val:
    if len(items) != 2 or not isinstance(items[0], Simd):
        raise e.fail("tilewright.bitcast takes a register and a dtype", code="TW016")
    dtype = e.dtype(items[1], "the dtype")
    if dtype.bits != items[0].kind.dtype.bits or dtype.is_bool or items[0].kind.dtype.is_bool:
        raise e.fail(f"{describe(items[0])} cannot be reinterpreted as {dtype}", code="TW009")
    return made(e.b.bitcast(vec(items[0]), dtype))


# -- lanes and methods ------------------------------------------------------------------------------------------------


def lane(e: Emitter, owner: Simd, number: int) -> NumberValue:
    return e.num(e.b.op("extract", vec(owner), lane=_checked(e, owner.kind, number)))


def _checked(e: Emitter, kind: SimdType, number: int) -> int:
    if not -kind.width <= number < kind.width:
        raise e.fail(f"lane {number} is outside: {kind.__name__} has {kind.width}", code="TW013")
    return number % kind.width


def member(e: Emitter, owner: Simd, name: str) -> Val:
    if name == "width":
        return NumberValue(i64, "int", None, owner.kind.width)
    if name not in _METHODS:
        raise e.fail(f"{describe(owner)} has no '{name}'", f"it has {', '.join(sorted(_METHODS))} and width", "TW002")
    return Method(owner, name)


def call_method(e: Emitter, method: Method, given: Arguments) -> Val:
    return _METHODS[method.name](e, method.owner, method.name, given)


def _fold(e: Emitter, owner: Simd, name: str, given: Arguments) -> Val:
    arguments(e, given, f"{owner.kind.__name__}.{name}", ())
    if owner.kind.dtype.is_bool:
        raise e.fail(f"a mask has no {name}", "use m.any() or m.all(), or tw.where first", "TW009")
    return e.num(e.b.op("fold", vec(owner), kind=_FOLDS[name]))


def _every(e: Emitter, owner: Simd, name: str, given: Arguments) -> Val:
    arguments(e, given, f"{owner.kind.__name__}.{name}", ())
    if not owner.kind.dtype.is_bool:
        raise e.fail(f"{describe(owner)} is no mask", "compare it first", "TW009")
    return e.num(e.b.op("fold", vec(owner), kind="and" if name == "all" else "or"))


def _store(e: Emitter, owner: Simd, name: str, given: Arguments) -> Val:
    memory, places = _access(e, given, f"{owner.kind.__name__}.store")
    if memory.type.space == "constant":
        raise e.fail(f"'{memory.name}' is captured from outside the kernel and cannot be written", "pass it as an argument", "TW015")
    if memory.type.dtype is not owner.kind.dtype:
        raise e.fail(f"'{memory.name}' holds {memory.type.dtype}, not {owner.kind.dtype}", f"convert it: v.cast(tw.{memory.type.dtype})", "TW009")
    e.b.multi("store", memory.value, *places, vec(owner), unaligned=True)
    return NOTHING


def _insert(e: Emitter, owner: Simd, name: str, given: Arguments) -> Val:
    found = arguments(e, given, f"{owner.kind.__name__}.insert", ("lane", "value"))
    at = _checked(e, owner.kind, e.constant(found["lane"], "the number of a lane"))
    number = e.convert(e.number(found["value"], "the value"), owner.kind.dtype, "the value")
    return made(e.b.op("insert", vec(owner), e.use(number, owner.kind.dtype), lane=at))


def _shuffle(e: Emitter, owner: Simd, name: str, given: Arguments) -> Val:
    items = given.items[0].items if len(given.items) == 1 and isinstance(given.items[0], Seq) else given.items
    other = given.named.get("other")
    unknown = [key for key in given.named if key != "other"]
    if unknown or len(items) < 2:
        raise e.fail(f"{owner.kind.__name__}.shuffle takes the numbers of two or more lanes, and other=", code="TW016")
    operands = [vec(owner)]
    if other is not None:
        operands.append(_splat(e, other, owner.kind, "other"))
    count = owner.kind.width * len(operands)
    lanes = [e.constant(item, "the number of a lane") for item in items]
    for number in lanes:
        if not 0 <= number < count:
            raise e.fail(f"lane {number} is outside: there are {count}", code="TW013")
    if len(lanes) & (len(lanes) - 1) or len(lanes) > 64:
        raise e.fail(f"{len(lanes)} lanes are no register", "take 2, 4, 8, 16, 32 or 64", "TW009")
    return made(e.b.op("rearrange", *operands, lanes=tuple(lanes)))


def _cast(e: Emitter, owner: Simd, name: str, given: Arguments) -> Val:
    (wanted,) = arguments(e, given, f"{owner.kind.__name__}.cast", ("dtype",)).values()
    dtype = as_dtype(wanted)
    if not isinstance(dtype, DType):
        raise e.fail(f"the dtype is {describe(wanted)}", "write for instance v.cast(tw.f32)", "TW009")
    return made(e.b.cast(vec(owner), dtype))


_METHODS: dict[str, Callable[[Emitter, Simd, str, Arguments], Val]] = {
    **dict.fromkeys(_FOLDS, _fold), "any": _every, "all": _every, "store": _store, "insert": _insert, "shuffle": _shuffle, "cast": _cast,
}  # fmt: skip
