"""The op table: every operation of the IR, once, with its meaning, type rule, effects, stages and error bound.

`docs/ops.md` is generated from this file (`python -m tilewright.ir.ops`). An op has one spelling everywhere. To add one,
see `docs/add-an-op.md`.

Elementwise ops take operands of one container (scalar, vec or tile of the same shape) and one dtype; they never
broadcast: `broadcast` does. Signedness is in the dtype. Integers wrap. Floats are IEEE, min and max propagate NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tilewright.base.dtypes import DType, bf16, bool_, compute_dtype, f16, f32, i32, i64, u32
from tilewright.base.sizes import Size
from tilewright.ir.nodes import Attrs
from tilewright.ir.opdef import ALL_STAGES as ALL_STAGES
from tilewright.ir.opdef import OpDef as OpDef
from tilewright.ir.opdef import Rule
from tilewright.ir.opdef import TypeRuleError as TypeRuleError
from tilewright.ir.opdef import integer as _int_attr
from tilewright.ir.opdef import memory_access as memory_access
from tilewright.ir.ops_lanes import DEFINITIONS as LANE_DEFINITIONS
from tilewright.ir.ops_matrix import DEFINITIONS
from tilewright.ir.ops_random import DEFINITIONS as RANDOM_DEFINITIONS
from tilewright.ir.ops_simt import ATOMICS as ATOMICS
from tilewright.ir.ops_simt import DEFINITIONS as SIMT
from tilewright.ir.ops_simt import LOAD_CACHES, STORE_CACHES, check_cache
from tilewright.ir.types import (
    BOOL,
    INDEX,
    NumberType,
    Scalar,
    Tensor,
    Tile,
    Type,
    Vec,
    dtype_of,
    is_number,
    with_dtype,
)

OPS: dict[str, OpDef] = {}


def _define(
    name: str, doc: str, rule: Rule | None, stages: str = "loop tile thread", effect: str = "pure",
    group: str = "elementwise", bound: str = "exact", regions: int = 0,
) -> None:  # fmt: skip
    OPS[name] = OpDef(name, doc, rule, frozenset(stages.split()), effect, group, bound, regions)


def _fail(message: str) -> TypeRuleError:
    return TypeRuleError(message)


# -- type rules ---------------------------------------------------------------------------------------------------


def _numbers(types: Sequence[Type], count: int) -> NumberType:
    if len(types) != count:
        raise _fail(f"takes {count} operands, got {len(types)}")
    for t in types:
        if not is_number(t):
            raise _fail(f"takes numbers, got {t}")
        if t != types[0]:
            raise _fail(f"operands must have one type, got {types[0]} and {t}")
    first = types[0]
    assert isinstance(first, Scalar | Vec | Tile)
    return first


def _same(count: int, kinds: str = "biuf") -> Rule:
    def rule(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
        first = _numbers(types, count)
        if first.dtype.kind not in kinds:
            raise _fail(f"does not take {first.dtype}")
        return (first,)

    return rule


def _compare(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    return (with_dtype(_numbers(types, 2), bool_),)


def _predicate(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    first = _numbers(types, 1)
    if not first.dtype.is_float:
        raise _fail(f"takes floats, got {first.dtype}")
    return (with_dtype(first, bool_),)


def _exponent(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    return (with_dtype(_same(1, "f")(types, attrs)[0], i32),)


def _scale(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    (first,) = _same(1, "f")(types[:1], attrs)
    if len(types) != 2 or types[1] != with_dtype(first, i32):
        raise _fail("takes a float and an i32 of the same shape")
    return (first,)


def _select(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    if len(types) != 3:
        raise _fail(f"takes 3 operands, got {len(types)}")
    first = _numbers(types[1:], 2)
    if types[0] not in (BOOL, with_dtype(first, bool_)):
        raise _fail(f"condition must be bool of the same shape, got {types[0]}")
    return (first,)


def _cast(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    return (with_dtype(_numbers(types, 1), _dtype(attrs)),)


def _bitcast(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    first, target = _numbers(types, 1), _dtype(attrs)
    if isinstance(first, Vec) and not first.dtype.is_bool and not target.is_bool and first.dtype.bits != target.bits and first.dtype.bits * first.width % target.bits == 0:
        width = first.dtype.bits * first.width // target.bits
        return (Vec(target, width) if width > 1 else Scalar(target),)
    if first.dtype.bits != target.bits or first.dtype.is_bool or target.is_bool:
        raise _fail(f"cannot reinterpret {first.dtype} as {target}")
    return (with_dtype(first, target),)


def _words_of(types: Sequence[Type], count: int) -> NumberType:
    first = _numbers(types, count)
    if first.dtype is not u32:
        raise _fail(f"takes u32, got {first.dtype}")
    return first


def _pair_dtype(attrs: Attrs) -> None:
    if attrs.get("dtype") not in (bf16, f16):
        raise _fail("dtype is bf16 or f16")


def _pair_bytes(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    high = attrs.get("high")
    if not isinstance(high, int) or not 0 <= high < 256 or not isinstance(attrs.get("upper", False), bool):
        raise _fail("takes high, a byte, and upper, a bool")
    return (_words_of(types, 1),)


def _add_pairs(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    _pair_dtype(attrs)
    return (_words_of(types, 2),)


def _dot_pairs(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    _pair_dtype(attrs)
    if not types or len(types) % 4:
        raise _fail("takes as many words of one factor as of the other, an even number")
    if attrs.get("spread", 1) not in (1, 4):
        raise _fail("spread is 1 or 4")
    return (with_dtype(_words_of(types, len(types)), f32),)


def _dtype(attrs: Attrs) -> DType:
    dtype = attrs.get("dtype")
    if not isinstance(dtype, DType):
        raise _fail("needs an attribute dtype")
    return dtype


def _shape_attr(attrs: Attrs) -> tuple[int, ...]:
    shape = attrs.get("shape")
    if not isinstance(shape, tuple) or not all(isinstance(s, int) and s > 0 for s in shape):
        raise _fail("needs an attribute shape of positive integers")
    return tuple(s for s in shape if isinstance(s, int))


def _const(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    if types or "value" not in attrs:
        raise _fail("takes no operands and needs an attribute value")
    return (Scalar(_dtype(attrs)),)


def _size(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    return (INDEX,)


def _index_result(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    return (INDEX,)


def _iota(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    shape, axis = _shape_attr(attrs), _int_attr(attrs, "axis")
    if not 0 <= axis < len(shape) or any(s != 1 for a, s in enumerate(shape) if a != axis):
        raise _fail("shape must be 1 on every axis but `axis`")
    return (Tile(i64, shape),)


def _broadcast(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    if len(types) != 1:
        raise _fail("takes one operand")
    source = types[0]
    if "width" in attrs:
        if not isinstance(source, Scalar):
            raise _fail("to a vec takes a scalar")
        return (Vec(source.dtype, _int_attr(attrs, "width")),)
    shape = _shape_attr(attrs)
    if isinstance(source, Scalar):
        return (Tile(source.dtype, shape),)
    if not isinstance(source, Tile) or len(source.shape) != len(shape):
        raise _fail(f"cannot broadcast {source} to {list(shape)}")
    if any(s not in (1, t) for s, t in zip(source.shape, shape, strict=True)):
        raise _fail(f"cannot broadcast {source} to {list(shape)}")
    return (Tile(source.dtype, shape, source.layout),)


def _check_mask(mask: Type, access: NumberType) -> None:
    if mask not in (BOOL, with_dtype(access, bool_)):
        raise _fail(f"mask must be bool of the accessed shape, got {mask}")


def _load(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    masked = bool(attrs.get("masked"))
    memory, access = memory_access(types, int(masked))
    if masked:
        _check_mask(types[-1], access)
    check_cache(memory, attrs, LOAD_CACHES)
    if "width" in attrs:
        return (Vec(memory.dtype, _int_attr(attrs, "width")),)
    return (access,)


def _load_image(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    image = types[0] if types else None
    axes = 3 if "planes" in attrs else 2
    if not isinstance(image, Tensor) or image.rank != axes + 2 or image.space != "global" or len(types) != axes + 3:
        raise _fail("takes a global tensor of four axes, a row, two offsets and a channel; with planes five axes and three offsets")
    for t in types[1:]:
        if not isinstance(t, Scalar) or not t.dtype.is_int:
            raise _fail(f"takes integers, got {t}")
    shape, lower, steps = _shape_attr(attrs), attrs.get("lower"), attrs.get("steps")
    if len(shape) != 2:
        raise _fail("gives a tile of two axes")
    if not all(isinstance(attrs.get(name), int | Size) for name in ("rows", "columns", *(["planes"] if axes == 3 else []))):
        raise _fail("needs sizes rows and columns, and planes where there are some")
    if not isinstance(lower, tuple) or len(lower) != axes or not all(isinstance(x, int | Size) for x in lower):
        raise _fail("lower is a size for each axis of an image: h and w, or d, h and w")
    if not isinstance(steps, tuple) or len(steps) != axes or not all(isinstance(x, int) and x > 0 for x in steps):
        raise _fail("steps are a positive integer for each axis of an image: h and w, or d, h and w")
    return (Tile(image.dtype, shape),)


def _store(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    masked = bool(attrs.get("masked"))
    memory, access = memory_access(types, 1 + int(masked))
    value = types[1 + memory.rank]
    if masked:
        _check_mask(types[-1], access)
    check_cache(memory, attrs, STORE_CACHES)
    if isinstance(value, Vec) and isinstance(access, Scalar) and value.dtype is memory.dtype:
        return ()
    if value != access and not (isinstance(value, Tile) and isinstance(access, Tile) and value.shape == access.shape
                                and value.dtype is access.dtype):  # fmt: skip
        raise _fail(f"stores {access}, got {value}")
    return ()


ACCUMULATIONS = ("add", "mul", "min", "max", "and", "or", "xor")
"""What `accumulate` combines with."""


def _accumulate(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    masked, kind = bool(attrs.get("masked")), str(attrs.get("kind"))
    memory, access = memory_access(types, 1 + int(masked))
    if kind not in ACCUMULATIONS:
        raise _fail(f"unknown accumulation {kind!r}")
    if memory.dtype.is_float and kind in ("and", "or", "xor"):
        raise _fail(f"accumulation {kind} does not take {memory.dtype}")
    if memory.dtype.is_bool and kind in ("add", "mul"):
        raise _fail(f"accumulation {kind} does not take bool")
    if masked:
        _check_mask(types[-1], access)
    value, wanted = types[1 + memory.rank], with_dtype(access, compute_dtype(memory.dtype))
    if not is_number(value) or dtype_of(value) is not dtype_of(wanted) or getattr(value, "shape", ()) != getattr(wanted, "shape", ()):
        raise _fail(f"combines {wanted}, got {value}")
    return ()


def _head(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    _, access = memory_access(types, 0)
    if not isinstance(access, Scalar) or _int_attr(attrs, "bytes") < 1:
        raise _fail("takes a tensor and scalar indices, and needs `bytes`")
    return (INDEX,)


def _inside(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    if len(types) != 2 or dtype_of(types[0]) is not i64 or types[1] != INDEX:
        raise _fail("takes indices and an extent")
    return (BOOL,)


def _within(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    if len(types) != 3 or not isinstance(types[0], Tensor) or types[1:] != [INDEX, INDEX] or attrs.get("access") not in ("load", "store"):
        raise _fail("takes a tensor and two indices, and needs the kind of `access`")
    if not 0 <= _int_attr(attrs, "axis") < types[0].rank:
        raise _fail("needs an axis of the tensor")
    return ()


def _report(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    if len(types) not in (3, 4) or not isinstance(types[0], Tensor) or types[0].dtype is not i64:
        raise _fail("takes a tensor of i64, an index and an extent")
    if len(types) == 3 and types[1:] != [INDEX, INDEX]:
        raise _fail("takes one index and one extent")
    if len(types) == 4 and (dtype_of(types[1]) is not i64 or types[2] != INDEX or types[3] != with_dtype(types[1], bool_)):
        raise _fail("takes indices, one extent, and as many bools that say which of them lie outside")
    if _int_attr(attrs, "site") < 1:
        raise _fail("sites are counted from 1 on")
    return ()


def _prefetch(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    if not isinstance(memory_access(types, 0)[1], Scalar):
        raise _fail("takes a tensor and scalar indices")
    size = attrs.get("bytes", 0)
    if not isinstance(size, int) or size < 0 or size % 16:
        raise _fail("fetches a multiple of 16 bytes")
    if attrs.get("write") not in (None, True):
        raise _fail("is to be written to, or says nothing of it")
    return ()


REDUCTIONS = ("add", "mul", "min", "max", "and", "or", "argmin", "argmax")


def reduction_results(kind: str, yields: Sequence[Type]) -> None:
    """Check what a reduction of that kind is fed with."""
    if kind not in REDUCTIONS:
        raise _fail(f"unknown reduction {kind!r}")
    wanted = 2 if kind.startswith("arg") else 1
    if len(yields) != wanted:
        raise _fail(f"reduction {kind} takes {wanted} value(s), got {len(yields)}")
    if wanted == 2 and dtype_of(yields[1]) not in (i32, i64):
        raise _fail(f"an {kind} index is i32 or i64, got {yields[1]}")


def _reduce_tile(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    reduction_results(str(attrs.get("kind")), types)
    axis = _int_attr(attrs, "axis")
    results: list[Type] = []
    for t in types:
        if not isinstance(t, Tile) or not 0 <= axis < len(t.shape):
            raise _fail(f"takes a tile with axis {axis}, got {t}")
        shape = tuple(1 if a == axis else s for a, s in enumerate(t.shape))
        results.append(Tile(t.dtype, shape, t.layout))
    return tuple(results)


def _item(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    if len(types) != 1 or not isinstance(types[0], Tile) or any(s != 1 for s in types[0].shape):
        raise _fail("takes a tile of one element")
    return (Scalar(types[0].dtype),)


def _dot(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    if len(types) != 3 or not all(isinstance(t, Tile) and len(t.shape) == 2 for t in types):
        raise _fail("takes three tiles of rank 2: a, b and the accumulator")
    a, b, acc = types
    assert isinstance(a, Tile) and isinstance(b, Tile) and isinstance(acc, Tile)
    if a.shape[1] != b.shape[0] or acc.shape != (a.shape[0], b.shape[1]) or a.dtype is not b.dtype:
        raise _fail(f"shapes do not meet: {a} @ {b} + {acc}")
    return (acc,)


def _transpose(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    if len(types) != 1 or not isinstance(types[0], Tile):
        raise _fail("takes one tile")
    order = attrs.get("order")
    if not isinstance(order, tuple) or sorted(o for o in order if isinstance(o, int)) != list(range(len(types[0].shape))):
        raise _fail("order must list every axis once")
    return (Tile(types[0].dtype, tuple(types[0].shape[o] for o in order if isinstance(o, int))),)


def _reshape(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    if len(types) != 1 or not isinstance(types[0], Tile):
        raise _fail("takes one tile")
    shape = _shape_attr(attrs)
    if prod(shape) != prod(types[0].shape):
        raise _fail(f"cannot reshape {types[0]} to {list(shape)}")
    return (Tile(types[0].dtype, shape),)


def _slice(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    if len(types) != 1 or not isinstance(types[0], Tile):
        raise _fail("takes one tile")
    shape, start = _shape_attr(attrs), attrs.get("start")
    if not isinstance(start, tuple) or len(start) != len(shape) or len(shape) != len(types[0].shape):
        raise _fail("start and shape need one number per axis")
    for begin, extent, whole in zip(start, shape, types[0].shape, strict=True):
        if not isinstance(begin, int) or begin < 0 or begin + extent > whole:
            raise _fail(f"slice leaves {types[0]}")
    return (Tile(types[0].dtype, shape),)


def _scan_tile(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    axis = _int_attr(attrs, "axis")
    if len(types) != 2 or not isinstance(types[0], Tile) or not 0 <= axis < len(types[0].shape):
        raise _fail("takes a tile with that axis, and what is before it")
    shape = tuple(1 if a == axis else s for a, s in enumerate(types[0].shape))
    if not isinstance(types[1], Tile) or types[1].shape != shape or types[1].dtype is not types[0].dtype:
        raise _fail(f"begins with a tile of {list(shape)}, got {types[1]}")
    return types[0], Tile(types[0].dtype, shape, types[0].layout)


def _convert_layout(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    if len(types) != 1 or not isinstance(types[0], Tile):
        raise _fail("takes one tile")
    return (types[0],)


def _alloc(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    from tilewright.ir.types import SPACES, tensor

    space = attrs.get("space")
    if space not in SPACES or space == "global":
        raise _fail("space must be shared, local or constant")
    values = attrs.get("values")
    if (space == "constant") != isinstance(values, tuple) or (isinstance(values, tuple) and len(values) != prod(_shape_attr(attrs))):
        raise _fail("constant memory, and no other, has an attribute values with a number for each element")
    align = attrs.get("align", 0)
    return (tensor(_dtype(attrs), *_shape_attr(attrs), space=str(space), align=align if isinstance(align, int) else 0),)


def _nothing(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    if types:
        raise _fail("takes no operands")
    return ()


def _extract(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    if len(types) != 1 or not isinstance(types[0], Vec) or not 0 <= _int_attr(attrs, "lane") < types[0].width:
        raise _fail("takes a vec and a lane inside it")
    return (Scalar(types[0].dtype),)


def _pack(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    if len(types) < 2 or not isinstance(types[0], Scalar) or any(t != types[0] for t in types):
        raise _fail("takes two or more scalars of one dtype")
    return (Vec(types[0].dtype, len(types)),)


def _split(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    if len(types) != 1 or not isinstance(types[0], Vec) or types[0].width % 2:
        raise _fail("takes a vec of even width")
    half = types[0].width // 2
    part: Type = Scalar(types[0].dtype) if half == 1 else Vec(types[0].dtype, half)
    return (part, part)


def _every(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    if len(types) != 1 or not isinstance(types[0], Vec) or not types[0].dtype.is_bool:
        raise _fail("takes a vec of bools")
    return (BOOL,)


def _any_operands(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    return ()


# -- the table ----------------------------------------------------------------------------------------------------

# Structure.
_define("const", "A number: attribute `value`, of `dtype`; with `kept`, nothing is folded with it; a name there makes it differ from others of its value.", _const, group="structure")
_define("size", "The value of a symbolic size: attribute `value`; with `kept`, LLVM is not told what it is made of (NVIDIA).", _size, group="structure")
_define("parallel", "`parallel %n0, %n1 (%i, %j) {…}`: run the body for every point of the domain, in any order. Yields nothing.",
        None, "loop", "control", "structure", regions=1)  # fmt: skip
_define("reduce", "`reduce %n0 {kind} (%i) {… yield %v}`: combine `%v` over the domain, in any order; the identity when it is empty. "
        "Kinds: add mul min max and or; argmin and argmax yield (value, index) and give both, the smallest index on ties, NaN first.",
        None, "loop", "pure", "structure", regions=1)  # fmt: skip
_define("for", "`for %lo, %hi, %step, %init… (%i, %carried…) {… yield %next…}`: a serial loop; results are the last carried values. "
        "Attributes: `unroll` (hint), `stages` (pipeline loads that many iterations ahead).", None, "loop tile thread", "control",
        "structure", regions=1)  # fmt: skip
_define("if", "`if %cond {… yield %a} {… yield %b}`: results are what the taken region yields.", None, "loop tile thread",
        "control", "structure", regions=2)  # fmt: skip
_define("while", "`while %init… (%c…) {… yield %cond, %c…} (%c…) {… yield %next…}`: loop as long as the first region's first value holds.",
        None, "loop tile thread", "control", "structure", regions=2)  # fmt: skip
_define("run_blocks", "`run_blocks %n, %work (%block) {…}`: run the body for every block from 0 to `%n`, in any order and side by side; all are done "
        "before the next op. `%work` says how many elements a block touches. On CPUs.", None, "thread", "sync", "structure", regions=1)  # fmt: skip
_define("yield", "Hands the region's values to its op.", _any_operands, effect="control", group="structure")

# Arithmetic.
for _name, _doc, _kinds in (
    ("add", "a + b", "iuf"), ("sub", "a - b", "iuf"), ("mul", "a * b", "iuf"),
    ("min", "The smaller; NaN if either is NaN.", "biuf"), ("max", "The larger; NaN if either is NaN. `hardware`: by one instruction, for which -0 is below 0.", "biuf"),
    ("floordiv", "Division rounded to minus infinity; integer division by zero gives 0.", "iuf"),
    ("mod", "`a - floordiv(a, b) * b`: the sign of b; integer modulo by zero gives 0.", "iuf"),
    ("and", "Bitwise, or logical on bool.", "biu"), ("or", "Bitwise, or logical on bool.", "biu"),
    ("xor", "Bitwise, or logical on bool.", "biu"),
    ("shl", "Shift left; the count is taken modulo the bits.", "iu"), ("shr", "Shift right, arithmetic if signed; the count modulo the bits.", "iu"),
):  # fmt: skip
    _define(_name, _doc, _same(2, _kinds))
_define("smaller", "a if a < b, else b: so b when either is NaN. One instruction everywhere, unlike `min`.", _same(2, "f"))
_define("larger", "a if a > b, else b: so b when either is NaN. One instruction everywhere, unlike `max`.", _same(2, "f"))
_define("div", "a / b, floats only, correctly rounded. `ordinary`: neither operands nor result lie near the ends of the range; a may be zero.", _same(2, "f"))
_define("fma", "a*b + c with one rounding.", _same(3, "f"))
_define("ldexp", "a * 2^b for a whole number b, with one rounding; by an instruction of the CPU.", _same(2, "f"), "thread")
for _name, _doc, _kinds in (
    ("neg", "-a", "iuf"), ("abs", "Absolute value.", "iuf"), ("not", "Bitwise, or logical on bool.", "biu"),
    ("floor", "Round to minus infinity.", "f"), ("ceil", "Round to plus infinity.", "f"),
    ("round", "Round to nearest, ties to even.", "f"), ("trunc", "Round to zero.", "f"),
    ("sqrt", "Square root, correctly rounded. `ordinary`: the operand is neither tiny nor huge.", "f"),
):  # fmt: skip
    _define(_name, _doc, _same(1, _kinds))
# What looks at the bits of floats; expanded by expand_math too.
_define("fmod", "The remainder of a / b, exact, with the sign of a.", _same(2, "f"))
_define("copysign", "The size of a with the sign of b.", _same(2, "f"))
_define("nextafter", "The number next to a on the way to b.", _same(2, "f"))
_define("frexp_fraction", "a as a fraction from 1/2 to 1 times a power of two: the fraction. 0, infinities and NaN are their own.", _same(1, "f"))
_define("frexp_exponent", "The power of two of `frexp_fraction`, as i32; 0 for 0, infinities and NaN.", _exponent)
_define("scale_by_power", "a * 2^n for an i32 n, with one rounding.", _scale)
for _name, _doc in (("eq", "a == b"), ("ne", "a != b"), ("lt", "a < b"), ("le", "a <= b"), ("gt", "a > b"), ("ge", "a >= b")):
    _define(_name, _doc + "; comparisons with NaN are false but for `ne`.", _compare)
_define("isnan", "Whether it is NaN.", _predicate)
_define("select", "`select cond, a, b`: a where cond holds, else b.", _select)
_define("cast", "Convert to `dtype`: floats round to nearest even; float to integer truncates and saturates, NaN gives 0; integers wrap; "
        "to bool is `!= 0`.", _cast)  # fmt: skip
_define("bitcast", "Reinterpret the bits as `dtype` of the same width; those of a vec as lanes of another width, the first ones first.", _bitcast)

# Words of two narrow floats, for products with packed weights on matrix instructions (`lower_row_dots`).
_define("pair_bytes", "The two lower bytes of a u32, or with `upper` the two upper ones, as the lower bytes of two 16-bit halves; the upper byte of both is `high`.",
        _pair_bytes, "loop tile")  # fmt: skip
_define("add_pairs", "The sums of the two floats of `dtype`, bf16 or f16, that each word holds, each rounded once.", _add_pairs)
_define("dot_pairs", "`dot_pairs %a…, %b… {dtype, spread}`: words of two floats of `dtype` each; the sum of all products of a's with b's, in f32. With `spread` 4 a lowering "
        "may give what four neighbours along a sum have together to one of them, and zero to the others: whoever says so treats them alike, and adds them up.",
        _dot_pairs, "loop tile")  # fmt: skip

# Functions: expanded to arithmetic by the pass expand_math; the bound holds on every target. An attribute `narrow` says that
# only as many bits count as that dtype has: the bound is then one ulp of it.
for _name, _doc, _bound in (
    ("exp", "e^a", "2"), ("exp2", "2^a", "2"), ("log", "Natural logarithm.", "2"), ("log2", "Logarithm to base 2.", "2"),
    ("sin", "Sine, radians.", "2"), ("cos", "Cosine, radians.", "2"), ("tan", "Tangent, radians.", "4"),
    ("tanh", "Hyperbolic tangent.", "3"), ("sinh", "Hyperbolic sine.", "4"), ("cosh", "Hyperbolic cosine.", "4"),
    ("erf", "Error function.", "4"), ("rsqrt", "1 / sqrt(a).", "2"), ("sigmoid", "1 / (1 + e^-a).", "4"),
    ("exp10", "10^a", "2"), ("expm1", "e^a - 1, also near 0.", "2"), ("log10", "Logarithm to base 10.", "2"), ("log1p", "log(1 + a), also near 0.", "2"),
    ("asin", "Inverse sine, radians.", "2"), ("acos", "Inverse cosine, radians.", "2"), ("atan", "Inverse tangent, radians.", "2"),
    ("asinh", "Inverse hyperbolic sine.", "2"), ("acosh", "Inverse hyperbolic cosine.", "2"), ("atanh", "Inverse hyperbolic tangent.", "2"),
    ("cbrt", "Cube root, also of negative numbers.", "1"), ("erfc", "1 - erf(a), also where that is tiny.", "5"),
    ("tgamma", "Gamma function.", "5"), ("lgamma", "Logarithm of the size of the gamma function; the bound is for positive numbers.", "5"),
):  # fmt: skip
    _define(_name, _doc, _same(1, "f"), bound=_bound, group="function")
_define("pow", "a^b with IEEE special cases.", _same(2, "f"), bound="4", group="function")
_define("atan2", "The angle of the point (b, a), from -pi to pi.", _same(2, "f"), bound="2", group="function")
_define("hypot", "sqrt(a^2 + b^2) without overflow on the way.", _same(2, "f"), bound="1", group="function")
_define("exp2_approx", "2^a by the device's own instruction, f32 only, denormal results flushed; `flush`: denormal operands too.", _same(1, "f"), "thread",
        bound="3", group="function")  # fmt: skip
_define("tanh_approx", "Hyperbolic tangent by the device's own instruction, f32 only, relative error 2^-10.9.", _same(1, "f"), "thread",
        bound="8400", group="function")  # fmt: skip
_define("rcp_approx", "1 / a by the device's own instruction, f32 only, denormals flushed.", _same(1, "f"), "thread", bound="1",
        group="function")  # fmt: skip

# Memory.
_define("load", "`load %t, %i, %j`: the element (scalars) or elements (index tiles) there. `masked`: a last operand says where; "
        "elsewhere 0. Thread stage: `width` loads that many elements that follow one another in memory, aligned to their whole "
        "size unless `unaligned`. Tile stage: `aligned` says that every so many elements along the last axis a vector of them, "
        "or 16 bytes, begins in memory. Loop and tile stage: `watch` names axes whose index is checked as the kernel runs. `apart`: it is not joined with other loads of the same elements. `framed`, loop stage: the array has zeros where the condition around it does not hold. `anchored`, thread stage: its address is counted from that of the first element of its row, which is kept at hand. `cache`, thread stage: how caches treat it: " + " ".join(LOAD_CACHES) + ".", _load, effect="read", group="memory")  # fmt: skip
_define("load_image", "`load_image %x, %row, %oh, %ow, %c {rows, columns, lower, steps, shape}`: a tile [m, k] of images "
        "[n, h, w, c] as a convolution's product reads them. Element [r, j] is channel c + j at h = p * `steps[0]` + `lower[0]` + oh, "
        "w = q * `steps[1]` + `lower[1]` + ow of image n, where row + r = (n * `rows` + p) * `columns` + q; 0 where there is none. With `planes` images "
        "are [n, d, h, w, c]: a third offset, and third numbers, stand before those of h.",
        _load_image, "tile", "read", "memory")  # fmt: skip
_define("store", "`store %t, %i, %j, %v`: like load, the other way round. `cache`: " + " ".join(STORE_CACHES) + ".", _store, effect="write", group="memory")
_define("accumulate", "`accumulate %t, %i, %j, %v {kind}`: the element there becomes `kind` of itself and `%v`, which other points of the domain may do "
        "to it too, in any order: no update is lost. Nothing else in the kernel reads or writes the tensor. Kinds: " + " ".join(ACCUMULATIONS) + ". `%v` of a "
        "float narrower than f32 is f32. `masked` and `watch`: as for a store; `of`: the array that a private copy, which has one axis more, is for. "
        "`alone`: only one thread has to do with the elements; `shared`, on a GPU: the most elements that blocks first combine in shared memory.", _accumulate, "loop tile", "write", "memory")  # fmt: skip
_define("head", "`head %t, %i, %j {bytes}`: how many elements from there on lie before the next address that is a multiple of `bytes`. "
        "Only where things lie depends on it, never a result.", _head, "tile thread", group="memory")  # fmt: skip
_define("prefetch", "`prefetch %t, %i, %j`: that element will be needed soon. Changes nothing but time, and may lie outside. `write`: it will be written. `bytes`: so many from there on, by the copy "
        "engine; those must lie inside.", _prefetch,
        "tile thread", "sync", "memory")  # fmt: skip
_define("report", "`report %failure, %index, %extent {site}`: an access lies outside its array. The first to say so leaves its site, index and extent "
        "in `%failure`. On a CPU the kernel's thread ends there; on a GPU it goes on, and the access is masked out. Tile stage: a fourth operand says "
        "which of the indices of a tile lie outside.", _report, "tile thread", "write", "memory")  # fmt: skip
_define("within", "`within %t, %first, %last {axis, access}`: both indices lie in the tensor along `axis`; checked as an access that has `watch` is.",
        _within, "tile", "write", "memory")  # fmt: skip
_define("inside", "`inside %i, %n`: whether no index of a tile is negative, or `%n` or more. They are looked at one by one.", _inside, "tile", group="memory")
_define("alloc", "A tensor of static `shape` and `dtype` in `space` (shared, local or constant); contents undefined, but for constant memory, which "
        "holds the numbers `values`.", _alloc,
        "tile thread", "write", "memory")  # fmt: skip

# Tiles.
_define("program_id", "This block's index along grid axis `axis`.", _index_result, "tile thread", group="tile")
_define("iota", "0, 1, 2… along `axis` of `shape`, whose other extents are 1.", _iota, "tile", group="tile")
_define("broadcast", "A scalar, or a tile with extents of 1, repeated to `shape`; a scalar to a vec of `width`.", _broadcast,
        "tile thread", group="tile")  # fmt: skip
_define("reduce_tile", "Combine along `axis`, which stays with extent 1. Kinds as for `reduce`. With `by_warp` each warp may combine only what it has of the tile: for bounds up to which it walks.", _reduce_tile, "tile", group="tile")
_define("scan_tile", "`scan_tile %x, %first {kind, axis}`: what is before each element along `axis`, combined from `%first` on, and what is after the last. Kinds add, mul, min, max.",
        _scan_tile, "tile", group="tile")  # fmt: skip
_define("item", "The element of a tile that has one.", _item, "tile", group="tile")
_define("dot", "`dot %a, %b, %acc`: matrix product plus accumulator; `precision` ieee, tf32, 3xtf32.", _dot, "tile", group="tile")
_define("transpose", "Axes in another `order`.", _transpose, "tile", group="tile")
_define("reshape", "The same elements in row-major order in another `shape`.", _reshape, "tile", group="tile")
_define("slice", "The part of `shape` from `start`.", _slice, "tile", group="tile")
_define("convert_layout", "The same tile in another layout.", _convert_layout, "tile", group="tile")

# Threads.
_define("thread_id", "This thread's index in its block. `fresh`, here and for `program_id`: what is computed of it is not moved far.", _index_result, "thread", group="thread")
_define("barrier", "Every thread of the block arrives before any leaves; memory is consistent after.", _nothing, "tile thread", "sync", "thread")
_define("grid_size", "How many blocks the launch has along grid axis `axis`.", _index_result, "thread", group="thread")
_define("grid_barrier", "Every thread of every block of the grid arrives before any leaves; memory is consistent across the device after. "
        "The blocks must all run at once: the launch is cooperative.", _nothing, "thread", "sync", "thread")  # fmt: skip
_define("fence", "Order memory accesses at `scope` thread, block, device or system.", _nothing, "thread", "sync", "thread")
_define("extract", "Element `lane` of a vec.", _extract, "thread", group="thread")
_define("pack", "A vec of these scalars.", _pack, "thread", group="thread")

_define("split", "The low and the high half of a vec.", _split, "thread", group="thread")
_define("every", "Whether all elements of a vec of bools are true.", _every, "thread", group="thread")

_define("step", "`step %a, %x {names, function}`: before a statement of the source, whose variables have these names and values. For the "
        "emulator's debugger: computes nothing, and code generators do not know it.", _any_operands, "thread", "debug", "thread")  # fmt: skip

# Matrix units, asynchronous copies and their barriers.
OPS.update({row.name: row for row in DEFINITIONS})
# Random numbers: expanded to arithmetic by the pass expand_random.
OPS.update({row.name: row for row in RANDOM_DEFINITIONS})
# Lanes of vecs on a CPU.
OPS.update({row.name: row for row in LANE_DEFINITIONS})

# What one thread, warp or block does in explicit kernels.
OPS.update({row.name: row for row in SIMT})


def result_types(opcode: str, operands: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    """The result types by the op's rule. Raises TypeRuleError."""
    definition = OPS.get(opcode)
    if definition is None:
        raise TypeRuleError(f"unknown op {opcode!r}")
    if definition.rule is None:
        raise TypeRuleError(f"{opcode} has regions; its types come from them")
    return definition.rule(operands, attrs)


def reference() -> str:
    """The op reference as Markdown."""
    lines = ["# Op reference", "", "Generated from the op table in `src/tilewright/ir/ops.py` by `python -m tilewright.ir.ops`.", ""]
    groups: dict[str, list[OpDef]] = {}
    for definition in OPS.values():
        groups.setdefault(definition.group, []).append(definition)
    for group, members in groups.items():
        lines += [f"## {group.capitalize()}", "", "| op | stages | effect | error (ulp) | meaning |", "|---|---|---|---|---|"]
        for d in members:
            stages = ", ".join(s for s in ("loop", "tile", "thread") if s in d.stages)
            lines.append(f"| `{d.name}` | {stages} | {d.effect} | {d.bound} | {d.doc} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(reference())
