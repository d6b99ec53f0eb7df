"""Records, hooks, and the layouts that machine code and the runtime agree on."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import pickle
import re

import pytest

from tilewright.base import abi, hooks, launch_abi, memory_abi
from tilewright.base.artifact import ArrayParam, Artifact, CallCheck, Launch, ScalarParam, SizeBinding
from tilewright.base.dtypes import f32, i64
from tilewright.base.record import record, replace
from tilewright.base.sizes import Size, ceildiv
from tilewright.base.source import NOWHERE
from tilewright.compile.cache import deserialise, serialise
from tilewright.ir.nodes import Op
from tilewright.ir.types import CopyMap, Scalar, Tensor, Tile, Vec


@record
class Point:
    """Two numbers."""

    x: int
    y: int = 2
    tags: list[str] = dataclasses.field(default_factory=list, compare=False, repr=False)


@record(kw_only=True)
class Named:
    x: int = 1


@record(identity=True)
class Single:
    x: int = 1


@record
class Cached:
    x: int

    @functools.cached_property
    def double(self) -> int:
        return 2 * self.x


# -- records --------------------------------------------------------------------------------------------------------


def test_a_record_is_a_frozen_dataclass() -> None:
    point = Point(1)
    assert dataclasses.is_dataclass(Point) and [f.name for f in dataclasses.fields(Point)] == ["x", "y", "tags"]
    assert (point.x, point.y, point.tags) == (1, 2, [])
    assert repr(point) == "Point(x=1, y=2)"
    assert dataclasses.replace(point, y=5) == Point(1, 5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        point.x = 3  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(point)) == point
    match point:
        case Point(x, y):
            assert (x, y) == (1, 2)


def test_equality_and_hash_are_those_of_the_fields() -> None:
    assert Point(1, tags=["a"]) == Point(1) != Point(2)
    assert hash(Point(1)) == hash(Point(1, 2))
    assert Point(1) != (1, 2)
    assert Point(1).tags is not Point(1).tags


def test_identity() -> None:
    one, other = Single(), Single()
    assert one != other and len({one, other}) == 2


@pytest.mark.parametrize(("arguments", "named"), [((), {}), ((1, 2, [], 4), {}), ((1,), {"z": 3})])
def test_wrong_arguments(arguments: tuple[int, ...], named: dict[str, int]) -> None:
    with pytest.raises(TypeError, match="Point"):
        Point(*arguments, **named)


def test_keyword_only() -> None:
    assert Named(x=3).x == 3
    with pytest.raises(TypeError, match="positional"):
        Named(3)  # type: ignore[misc]


@record(identity=True, slots=True)
class Slotted:
    """Two numbers without a dictionary."""

    x: int
    y: int = 2

    def __init__(self, x: int, y: int = 2) -> None:
        object.__setattr__(self, "x", x)
        object.__setattr__(self, "y", y)


@record
class Written:
    """A number that is compared by what is left of it."""

    x: int

    def __init__(self, x: int) -> None:
        self.__dict__["x"] = x % 10

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Written) and self.x == other.x

    def __hash__(self) -> int:
        return self.x


def test_slots_have_no_dictionary() -> None:
    one = Slotted(1)
    assert (one.x, one.y) == (1, 2) and not hasattr(one, "__dict__")
    assert repr(one) == "Slotted(x=1, y=2)" and Slotted.__qualname__ == "Slotted"
    assert one != Slotted(1) and one == one and len({one, Slotted(1)}) == 2
    assert [f.name for f in dataclasses.fields(one)] == ["x", "y"]
    assert dataclasses.replace(one, y=5).y == 5
    for again in (pickle.loads(pickle.dumps(one)), copy.copy(one), copy.deepcopy(one)):
        assert (again.x, again.y) == (1, 2) and type(again) is Slotted
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.x = 3  # type: ignore[misc]
    match one:
        case Slotted(x, y):
            assert (x, y) == (1, 2)


def test_slots_without_what_they_need_are_refused() -> None:
    class Plain:
        x: int

    with pytest.raises(TypeError, match="Plain: a record with slots compares by identity and writes its __init__"):
        record(identity=True, slots=True)(Plain)
    with pytest.raises(TypeError, match="compares by identity"):
        record(slots=True)(type("Own", (), {"__init__": Slotted.__init__}))


def test_methods_that_a_class_writes_stay() -> None:
    assert Written(13).x == 3 and Written(13) == Written(23) and hash(Written(13)) == 3
    assert dataclasses.replace(Written(13), x=4).x == 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        Written(1).x = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    "one",
    [Scalar(f32), Vec(f32, 4), Tile(f32, (4, 8)), Tensor(f32, (Size.of("n"),), (Size.of(1),), "shared", 16), CopyMap(f32, (4, 8), 32)],
    ids=lambda one: type(one).__name__,
)
def test_types_of_values_compare_by_their_fields(one: Scalar | Vec | Tile | Tensor | CopyMap) -> None:
    again = pickle.loads(pickle.dumps(one))
    assert again == one and hash(again) == hash(one) and again is not one
    others = [dataclasses.replace(one, **{f.name: changed}) for f in dataclasses.fields(one) for changed in (i64, 3)]
    assert len({one, again, *others}) == 1 + len(others)
    assert one != "f32" and one != Scalar(i64)


# -- artifacts ------------------------------------------------------------------------------------------------------

N = Size.of("n")
ARTIFACT = Artifact(
    "scale", "sm_90a", "ptx", b"code\0", (ArrayParam("x", f32, (N,), (Size.of(1),), "input", 16), ScalarParam("a", i64)),
    (ArrayParam("o", f32, (N,), (Size.of(1),), "output"),), (), (Launch("k", ("x", "a", "o"), ("n",), (ceildiv(N, 128),), 128),),
    (SizeBinding("n", "x", 0),), (CallCheck(N, "le", Size.of(8), "too long"),), facts=(("n", 4),), key="0" * 64,
)  # fmt: skip


def test_an_artifact_comes_back() -> None:
    assert deserialise(serialise(ARTIFACT)) == ARTIFACT
    assert pickle.loads(pickle.dumps(ARTIFACT)) == ARTIFACT
    assert dataclasses.replace(ARTIFACT, code=b"other") != ARTIFACT


# -- hooks ----------------------------------------------------------------------------------------------------------


def test_what_is_provided_is_loaded_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "_loaders", {})
    loaded: list[str] = []
    hooks.provide("answer", lambda: loaded.append("now") or 42)
    assert not loaded
    assert hooks.asked("answer") == 42 and loaded == ["now"]
    with pytest.raises(KeyError):
        hooks.asked("nothing")


# -- layouts --------------------------------------------------------------------------------------------------------


def fields(module: object, prefix: str) -> dict[str, int]:
    found = {name: getattr(module, name) for name in dir(module) if re.fullmatch(rf"{prefix}_[A-Z_]+", name)}
    return {name: value for name, value in found.items() if not name.endswith("_BYTES") or name == "FORM_MAP_BYTES"}


@pytest.mark.parametrize(
    ("module", "prefix", "size"),
    [
        (launch_abi, "STATE", launch_abi.STATE_BYTES), (launch_abi, "WAIT", launch_abi.WAIT_BYTES), (launch_abi, "FORM", launch_abi.FORM_BYTES),
        (launch_abi, "APART", launch_abi.APART_BYTES), (launch_abi, "SCALAR", launch_abi.SCALAR_BYTES),
        (launch_abi, "STEP", launch_abi.STEP_BYTES), (memory_abi, "IMPORT", memory_abi.IMPORT_BYTES),
    ],
)  # fmt: skip
def test_fields_are_words_that_do_not_overlap(module: object, prefix: str, size: int) -> None:
    offsets = sorted(fields(module, prefix).values())
    assert offsets and all(offset % 8 == 0 for offset in offsets)
    assert len(set(offsets)) == len(offsets) and offsets[-1] + 8 <= size


def test_hot_fields_of_the_pool_have_cache_lines_of_their_own() -> None:
    hot = (abi.POOL_GENERATION, abi.POOL_PENDING, abi.POOL_SLEEPERS, abi.POOL_NEXT, abi.POOL_ENTRY)
    assert len({offset // 128 for offset in hot}) == len(hot)
    offsets = sorted(fields(abi, "POOL").values())
    assert all(after - before >= 4 for before, after in itertools.pairwise(offsets))
    assert abi.POOL_CONDITION + 64 <= abi.POOL_BYTES and abi.POOL_BYTES % 128 == 0


def test_an_assertion_fits_beside_its_mark() -> None:
    assert sum(abi.ASSERT_BITS) <= 62
    assert abi.WATCHDOG_MARK & abi.ASSERT_MARK == 0


def test_slots_of_a_class() -> None:
    assert memory_abi.slot(("a", "b", "c"), "c", 16) == 32
    assert list(memory_abi.BLOCK_SLOTS) == sorted(memory_abi.BLOCK_SLOTS)
    assert list(memory_abi.ARRAY_SLOTS) == sorted(memory_abi.ARRAY_SLOTS)


@pytest.mark.parametrize("nbytes", [1, 511, 512, 513, 8192, 8193, 9216, 9217, 1 << 20, (1 << 20) + 1, 1 << 30])
def test_size_classes(nbytes: int) -> None:
    found = memory_abi.size_class(nbytes)
    assert nbytes <= found.nbytes < nbytes + max(memory_abi.SMALLEST, nbytes // 8 + 1)
    assert 0 <= found.index < memory_abi.CLASSES
    assert memory_abi.size_class(found.nbytes) == found
    assert memory_abi.size_class(found.nbytes + 1).index in (found.index + 1, -1)


def test_memory_beyond_the_largest_class() -> None:
    found = memory_abi.size_class(memory_abi.LARGEST + 1)
    assert found.index == -1 and found.nbytes == memory_abi.LARGEST + (2 << 20)


# -- replace --------------------------------------------------------------------------------------------------------


def test_replace_gives_what_that_of_dataclasses_gives() -> None:
    point = Point(1, tags=["a"])
    assert replace(point, y=5) == dataclasses.replace(point, y=5) == Point(1, 5)
    assert replace(point, y=5).tags is point.tags
    op = Op("add", (), (), span=NOWHERE)
    assert replace(op, opcode="mul").opcode == "mul" and replace(op).operands == ()
    assert replace(Named(x=2), x=3).x == 3
    with pytest.raises(TypeError, match="unknown arguments"):
        replace(point, z=1)


def test_replace_leaves_behind_what_properties_computed() -> None:
    kernel = Cached(2)
    assert kernel.double == 4 and replace(kernel, x=3).double == 6
