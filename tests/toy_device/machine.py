"""The toy device's instructions, and how a launch of its code is executed: block after block, all threads of a block in step.

In: code that `codegen.py` wrote, the name of a kernel, its grid, and arrays as views of bytes. Out: what the kernel writes to them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tilewright.base.dtypes import by_name
from tilewright.base.sizes import CALLS
from tilewright.ir import numerics

Array = np.ndarray


@dataclass(frozen=True)
class Memory:
    """Elements one after another; where `apart` is not 0, so many for each thread."""

    flat: Array
    apart: int = 0

    def places(self, offset: Array, width: int = 0) -> Array:
        """Where the elements that each thread means lie."""
        own = offset + np.arange(len(offset)) * self.apart if self.apart else offset
        return own[:, None] + np.arange(width) if width else own


def global_memory(view: Array, dtype: str) -> Memory:
    return Memory(view.view(by_name(dtype).numpy))


def shared_memory(count: int, dtype: str, threads: int) -> Memory:
    return Memory(np.zeros(count, by_name(dtype).numpy))


def local_memory(count: int, dtype: str, threads: int) -> Memory:
    return Memory(np.zeros(count * threads, by_name(dtype).numpy), count)


def constant_memory(values: Sequence[float], dtype: str) -> Memory:
    return Memory(np.array(values, by_name(dtype).numpy))


def full(threads: int, dtype: str, value: object) -> Array:
    numpy = by_name(dtype).numpy
    if numpy.kind in "iu" and isinstance(value, int):
        value = value & ((1 << 8 * numpy.itemsize) - 1)
        return np.full(threads, value, f"u{numpy.itemsize}").view(numpy)
    return np.full(threads, value, numpy)


def zeros(threads: int, dtype: str, width: int = 0) -> Array:
    return np.zeros((threads, width) if width else threads, by_name(dtype).numpy)


def index(value: Array) -> Array:
    return value.astype(np.int64)


def number(opcode: str, dtype: str, *operands: Array, to: str = "") -> Array:
    return numerics.evaluate(opcode, operands, {"dtype": by_name(to)} if to else {}, by_name(dtype))


def _like(mask: Array, value: Array) -> Array:
    return mask[:, None] if mask.ndim < value.ndim else mask


def merge(mask: Array, new: Array, old: Array) -> Array:
    return np.where(_like(mask, new), new, old)


def select(cond: Array, a: Array, b: Array) -> Array:
    return np.where(_like(cond, a), a, b)


def also(mask: Array, cond: Array) -> Array:
    return _like(mask, cond) & cond


def broadcast(value: Array, width: int) -> Array:
    return np.repeat(value[:, None], width, axis=1)


def pack(*values: Array) -> Array:
    return np.stack(values, axis=1)


def split(value: Array) -> tuple[Array, Array]:
    half = value.shape[1] // 2
    return (value[:, 0], value[:, 1]) if half == 1 else (value[:, :half], value[:, half:])


def load(memory: Memory, offset: Array, mask: Array, width: int) -> Array:
    places = memory.places(offset, width)
    active = np.broadcast_to(_like(mask, places), places.shape)
    result = np.zeros(places.shape, memory.flat.dtype)
    result[active] = memory.flat[_inside(memory, places[active])]
    return result


def store(memory: Memory, offset: Array, value: Array, mask: Array) -> None:
    places = memory.places(offset, value.shape[1] if value.ndim > 1 else 0)
    active = np.broadcast_to(_like(mask, places), places.shape)
    memory.flat[_inside(memory, places[active])] = value[active]


def _inside(memory: Memory, places: Array) -> Array:
    if places.size and not (places.min() >= 0 and places.max() < memory.flat.size):
        raise IndexError(f"an access to element {places.min()} or {places.max()} of {memory.flat.size}")
    return places


def atomic(kind: str, memory: Memory, offset: Array, mask: Array, value: Array) -> Array:
    """One thread after another."""
    old = np.zeros(value.shape, memory.flat.dtype)
    places = memory.places(offset)
    for thread in np.flatnonzero(mask):
        place = places[thread : thread + 1]
        old[thread] = memory.flat[_inside(memory, place)][0]
        new = value[thread : thread + 1]
        if kind != "exchange":
            new = number(kind, str(np_name(memory.flat.dtype)), old[thread : thread + 1], new)
        memory.flat[place] = new
    return old


def np_name(dtype: np.dtype) -> str:
    return {"f": "f", "i": "i", "u": "u"}[dtype.kind] + str(8 * dtype.itemsize)


# -- subgroups ----------------------------------------------------------------------------------------------------------


def thread_id(threads: int, lanes: int) -> Array:
    return np.arange(threads, dtype=np.int64)


def lane_id(threads: int, lanes: int) -> Array:
    return (np.arange(threads) % lanes).astype(np.int32)


def warp_id(threads: int, lanes: int) -> Array:
    return (np.arange(threads) // lanes).astype(np.int32)


def lane_mask(threads: int, lanes: int, relation: str) -> Array:
    other = np.arange(lanes)
    related = {"eq": np.equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}[relation]
    holds = related(other[None, :], lane_id(threads, lanes)[:, None])
    return (holds.astype(np.uint32) << other.astype(np.uint32)).sum(axis=1, dtype=np.uint32)


def shuffle(value: Array, operand: Array, mode: str, width: int, lanes: int) -> Array:
    thread = np.arange(len(value))
    lane, start = thread % lanes, thread // lanes * lanes
    low, distance = lane // width * width, operand.astype(np.int64)
    if mode == "idx":
        source = low + distance % width
    else:
        source = lane - distance if mode == "up" else lane + distance if mode == "down" else lane ^ distance
        source = np.where((source < low) if mode == "up" else (source >= low + width), lane, source)
    return value[np.minimum(start + source, len(value) - 1)]


def vote(value: Array, mode: str, lanes: int, active: Array, among: Array | None = None) -> Array:
    """Over the active lanes of each subgroup, or those of them that a mask names."""
    if among is not None:
        active = active & (among >> lane_id(len(value), lanes).astype(np.uint32) & 1).astype(bool)
    part, holds = active.reshape(-1, lanes), (value & active).reshape(-1, lanes)
    if mode == "ballot":
        word = (holds.astype(np.uint32) << np.arange(lanes, dtype=np.uint32)).sum(axis=1, dtype=np.uint32)
        return np.repeat(word, lanes)
    some, all_ = holds.any(axis=1), (holds == part).all(axis=1)
    return np.repeat({"any": some, "all": all_, "uniform": all_ | ~some}[mode], lanes)


def _bit_table(value: Array) -> Array:
    """A row of bits for each number, the lowest first."""
    octets = np.ascontiguousarray(value).view(np.uint8).reshape(len(value), -1)
    return np.unpackbits(octets, axis=1, bitorder="little")


def popcount(value: Array) -> Array:
    return _bit_table(value).sum(axis=1).astype(value.dtype)


def ctz(value: Array) -> Array:
    table = _bit_table(value)
    return np.where(table.any(axis=1), table.argmax(axis=1), table.shape[1]).astype(value.dtype)


def clz(value: Array) -> Array:
    table = _bit_table(value)[:, ::-1]
    return np.where(table.any(axis=1), table.argmax(axis=1), table.shape[1]).astype(value.dtype)


# -- launches -----------------------------------------------------------------------------------------------------------

_INSTRUCTIONS: Mapping[str, object] = {
    **{f.__name__: f for f in (
        global_memory, shared_memory, local_memory, constant_memory, full, zeros, index, number, merge, select, also, broadcast, pack, split,
        load, store, atomic, thread_id, lane_id, warp_id, lane_mask, shuffle, vote, popcount, ctz, clz,
    )},
    **{f"size_{name}": rule for name, rule in CALLS.items()},
}  # fmt: skip


def load_code(code: bytes) -> dict[str, Callable[..., None]]:
    """The kernels of an artifact's code, by entry."""
    names = dict(_INSTRUCTIONS)
    exec(compile(code.decode(), "<toy code>", "exec"), names)
    return {name: value for name, value in names.items() if callable(value) and name.startswith("tw_")}  # type: ignore[misc]


def launch(kernel: Callable[..., None], grid: Sequence[int], arguments: Sequence[object], sizes: Sequence[int]) -> None:
    """Run a kernel: `arguments` are arrays as views of bytes, and numbers, in the order of its parameters."""
    extents = (*grid, *(1,) * (3 - len(grid)))
    with np.errstate(all="ignore"):
        for z, y, x in itertools.product(*(range(extent) for extent in reversed(extents))):
            kernel((x, y, z), extents, *arguments, *sizes)
