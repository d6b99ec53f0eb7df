"""Rows of the op table for the lanes of vecs: what a CPU does with the elements of one SIMD value.

A vec stands for neighbouring threads of a block (`passes.simt_to_simd.lower_threads`), or is an explicit SIMD value. A *mask* is a vec of
bools of the same width: where it is false memory is not touched, whatever the index there is.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.dtypes import DType, bool_, by_name, f32, i8, i32, i64, u8, u32
from tilewright.base.record import record
from tilewright.ir.nodes import Attrs, Value
from tilewright.ir.opdef import OpDef, Rule, TypeRuleError, integer
from tilewright.ir.types import Scalar, Tensor, Type, Vec

WIDEST = 32
"""Lanes of the masks that fit `mask_bits`."""
FOLDS = ("add", "mul", "min", "max", "and", "or", "xor")


def _fail(message: str) -> TypeRuleError:
    return TypeRuleError(message)


def _vec(type_: Type, what: str) -> Vec:
    if not isinstance(type_, Vec):
        raise _fail(f"{what} must be a vec, got {type_}")
    return type_


def _mask(type_: Type) -> int:
    mask = _vec(type_, "the mask")
    if not mask.dtype.is_bool:
        raise _fail(f"the mask must hold bools, got {mask}")
    return mask.width


def _access(types: Sequence[Type], extra: int, width: int, scattered: bool) -> Tensor:
    """The tensor of `tensor, indices…, extra operands`, whose indices are scalars or, where `scattered`, vecs of that width."""
    if not types or not isinstance(types[0], Tensor):
        raise _fail("first operand must be a tensor")
    memory = types[0]
    if len(types) != 1 + memory.rank + extra:
        raise _fail(f"a tensor of rank {memory.rank} takes {memory.rank} indices, got {len(types) - 1 - extra}")
    for index in types[1 : 1 + memory.rank]:
        if index != Scalar(i64) and not (scattered and index == Vec(i64, width)):
            raise _fail(f"an index must be i64{f' or vec<i64, {width}>' if scattered else ''}, got {index}")
    return memory


def _gather(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    width = _mask(types[-1])
    return (Vec(_access(types, 1, width, True).dtype, width),)


def _scatter(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    width = _mask(types[-1])
    memory = _access(types, 2, width, True)
    if types[-2] != Vec(memory.dtype, width):
        raise _fail(f"writes vec<{memory.dtype}, {width}>, got {types[-2]}")
    return ()


def _load_lanes(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    width = _mask(types[-1])
    return (Vec(_access(types, 1, width, False).dtype, width),)


def _store_lanes(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    width = _mask(types[-1])
    memory = _access(types, 2, width, False)
    if types[-2] != Vec(memory.dtype, width):
        raise _fail(f"writes vec<{memory.dtype}, {width}>, got {types[-2]}")
    return ()


def _lane_ids(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    dtype = attrs.get("dtype")
    if types or not isinstance(dtype, DType) or not dtype.is_int:
        raise _fail("takes no operands and needs an integer dtype")
    return (Vec(dtype, integer(attrs, "width")),)


def _mask_bits(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    if len(types) != 1 or _mask(types[0]) > WIDEST:
        raise _fail(f"takes a mask of at most {WIDEST} lanes")
    return (Scalar(u32),)


def _rearrange(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    if len(types) not in (1, 2) or any(t != types[0] for t in types):
        raise _fail("takes one or two vecs of one type")
    source = _vec(types[0], "the value")
    lanes, count = attrs.get("lanes"), source.width * len(types)
    if not isinstance(lanes, tuple) or len(lanes) < 2 or not all(type(k) is int and 0 <= k < count for k in lanes):
        raise _fail(f"needs an attribute lanes of two or more numbers below {count}")
    if attrs.get("table") and (source.dtype.itemsize, source.width, len(lanes)) != (1, 16, 16):
        raise _fail("table takes and gives vecs of 16 bytes")
    return (Vec(source.dtype, len(lanes)),)


def _compress(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    if len(types) != 2 or not isinstance(types[0], Vec) or _mask(types[1]) != types[0].width:
        raise _fail("takes a vec and a mask of its width")
    return (types[0],)


def _insert(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    if len(types) != 2 or not isinstance(types[0], Vec) or types[1] != Scalar(types[0].dtype):
        raise _fail("takes a vec and a scalar of its dtype")
    if not 0 <= integer(attrs, "lane") < types[0].width:
        raise _fail(f"lane {attrs['lane']} is outside {types[0]}")
    return (types[0],)


def _fold(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    if len(types) != 1 or attrs.get("kind") not in FOLDS:
        raise _fail(f"takes one vec and a kind of {', '.join(FOLDS)}")
    source, kind = _vec(types[0], "the value"), attrs["kind"]
    if source.width & (source.width - 1):
        raise _fail(f"takes a power of two of lanes, got {source.width}")
    if (kind in ("and", "or", "xor") and source.dtype.is_float) or (kind in ("add", "mul") and source.dtype is bool_):
        raise _fail(f"{kind} does not take {source.dtype}")
    return (Scalar(source.dtype),)


def _dot_lanes(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    if len(types) != 3 or not isinstance(types[0], Vec) or types[0].dtype is not i32:
        raise _fail("takes a vec of i32 and two of bytes")
    if any(t != Vec(i8, 4 * types[0].width) for t in types[1:]):
        raise _fail(f"multiplies vec<i8, {4 * types[0].width}>, got {types[1]} and {types[2]}")
    return (types[0],)


def _as_lanes(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    dtype = attrs.get("dtype")
    source = _vec(types[0], "the value") if len(types) == 1 else None
    if source is None or not isinstance(dtype, DType) or dtype.is_bool or source.dtype.is_bool or source.dtype.bits % 8 or dtype.bits % 8:
        raise _fail("takes a vec of whole bytes and needs a dtype of such")
    width, rest = divmod(source.width * source.dtype.itemsize, dtype.itemsize)
    if rest or width < 2:
        raise _fail(f"{source} is not two or more {dtype}")
    return (Vec(dtype, width),)


def _join_halves(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    if len(types) != 2 or types[0] != types[1] or _vec(types[0], "the value").dtype is not u8 or attrs.get("side") not in ("low", "high"):
        raise _fail("takes two vecs of u8 and a side of low or high")
    return (types[0],)


@record
class PackedOperands:
    """What `packed_dots` takes: the weights; the activations rounded, their scales, their sums, or the activations alone; the indices of each row of both."""

    tensors: tuple[Value, Value, Value | None, Value | None]
    rows: tuple[tuple[Value, ...], ...]
    columns: tuple[tuple[Value, ...], ...]


def packed_operands(operands: Sequence[Value], attrs: Attrs) -> PackedOperands:
    """The operands of `packed_dots` by what they are."""
    tensors = [v for v in operands if isinstance(v.type, Tensor)]
    indices = list(operands[len(tensors) :])
    ranks = [v.type.rank - (1 if number and len(tensors) == 2 else 2) for number, v in enumerate(tensors[:2]) if isinstance(v.type, Tensor)]
    counts = integer(attrs, "rows"), integer(attrs, "columns")
    groups: list[tuple[tuple[Value, ...], ...]] = []
    for rank, count in zip(ranks, counts, strict=True):
        groups.append(tuple(tuple(indices[at * rank : (at + 1) * rank]) for at in range(count)))
        del indices[: rank * count]
    w, q, *others = tensors
    return PackedOperands((w, q, others[0] if others else None, others[1] if len(others) > 1 else None), groups[0], groups[1])


def _packed_dots(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    tensors = [t for t in types if isinstance(t, Tensor)]
    name = attrs.get("format")
    if len(tensors) not in (2, 3, 4) or any(isinstance(t, Tensor) for t in types[len(tensors) :]) or not isinstance(name, str) or not by_name(name).is_packed:
        raise _fail("takes weights, activations, their scales and perhaps sums, then indices, and needs a packed format")
    w, q, *others = tensors
    dtype = by_name(name)
    if w.dtype is not u8 or w.shape[-1].constant != dtype.block_bytes:
        raise _fail(f"takes bytes of {dtype}")
    if (q.dtype is not i8 or others[0].dtype is not f32 or q.shape[-1].constant != dtype.block) if others else not q.dtype.is_float:
        raise _fail("takes activations of i8 and scales of f32, or activations of floats")
    rows, columns, lead = integer(attrs, "rows"), integer(attrs, "columns"), q.rank - (2 if others else 1)
    if list(types[len(tensors) :]) != [Scalar(i64)] * (rows * (w.rank - 2) + columns * lead):
        raise _fail("needs the indices of every row of weights, then of activations")
    return (Scalar(f32),) * (rows * columns)


def _fault(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    if list(types) != [Scalar(i64), Scalar(i64)] or not isinstance(attrs.get("text"), str):
        raise _fail("takes the numbers of the block and the thread, and needs a text")
    return ()


def _row(name: str, doc: str, rule: Rule, effect: str = "pure") -> OpDef:
    return OpDef(name, doc, rule, frozenset({"thread"}), effect, "lanes")


DEFINITIONS: tuple[OpDef, ...] = (
    _row("lane_ids", "0, 1, 2… in the lanes of a vec of `width` and `dtype`.", _lane_ids),
    _row("gather", "`gather %t, %i, %j, %mask`: for each lane the element at its own indices; an index is a vec, or a scalar that holds for all "
         "lanes. 0 where the mask is false.", _gather, "read"),
    _row("scatter", "`scatter %t, %i, %j, %v, %mask`: like gather, the other way round; where lanes meet the highest wins.", _scatter, "write"),
    _row("load_lanes", "`load_lanes %t, %i, %j, %mask`: as many elements that follow one another in memory as the mask has lanes; 0 where "
         "it is false.", _load_lanes, "read"),
    _row("store_lanes", "`store_lanes %t, %i, %j, %v, %mask`: like load_lanes, the other way round.", _store_lanes, "write"),
    _row("mask_bits", "A mask as the bits of a number, lane 0 the lowest.", _mask_bits),
    _row("rearrange", "`rearrange %a, %b {lanes}`: a vec of those lanes of one vec, or of two one after the other. `table`: bytes by one instruction of an Arm CPU.", _rearrange),
    _row("compress", "`compress %v, %mask`: the lanes where the mask is true, in their order, at the front; 0 behind them.", _compress),
    _row("insert", "The vec with `lane` exchanged for the scalar.", _insert),
    _row("fold", "All lanes combined to one number: `kind` add, mul, min, max, and, or, xor. Halves are combined lane by lane until one lane is "
         "left. `together`: integers, in any order.", _fold),
    _row("dot_lanes", "`dot_lanes %sums, %a, %b`: to each lane of the sums, i32, four products of bytes, i8, are added, those of "
         "neighbours. `unit`: the CPU's instruction, sdot, vnni or maddubs; for the latter two, `positive` says that no lane of %a is negative, and no lane of %b is "
         "-128. Without one LLVM chooses which lanes are added up together.", _dot_lanes),
    _row("as_lanes", "The bytes of a vec as lanes of `dtype`, which may be of another size; of each lane the lowest byte comes first.", _as_lanes),
    _row("join_halves", "`join_halves %a, %b {side}`: bytes of two halves of four bits. `low`: the lower half of a, and above it the lower half of b; `high`: the "
         "upper half of a, and below it the upper half of b. `arm`: by one instruction of such a CPU.", _join_halves),
    OpDef("packed_dots", "`packed_dots %w, %q, %scale, %sums, %i…, %m… {format, rows, columns}`: the sums of rows of packed weights times rows of activations "
          "that are rounded to eight bits, block by block: a result for each pair, those of the first row first. Weights lie as bytes [..., blocks, bytes of "
          "one], activations as i8 [..., blocks, elements of one]; the indices of each row of weights, then of activations follow. `%sums` are the sums of "
          "rounded activations, where the format needs them. Without `%scale` the activations are floats [..., elements], and nothing is rounded but sums. On CPUs.", _packed_dots, frozenset({"tile", "thread"}), "read", "lanes"),
    _row("fault", "`fault %block, %thread {text}`: an assertion of that text has failed in that thread; the kernel ends here.", _fault, "write"),
)  # fmt: skip
