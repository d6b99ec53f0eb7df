"""A form: all that a call with arguments of known sizes still has to do, as a record in memory that machine code reads.

In: a loaded program, sizes, and what makes results and scratch memory; out: a `LaunchRecord`, whose `address` is the record of
`base.launch_abi`. What machine code cannot do by itself it calls back for: results, scratch memory, tensor maps for new
addresses, numbers of dtypes without an instruction, and errors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tilewright.base import launch_abi as abi
from tilewright.base.artifact import FAILURE, ScalarParam
from tilewright.base.dtypes import DType
from tilewright.runtime.core.device import Workspace
from tilewright.runtime.core.launch_log import SEVERAL
from tilewright.runtime.cuda.grids import attribute
from tilewright.runtime.cuda.program import CudaProgram
from tilewright.runtime.cuda.tensor_maps import MAP_ALIGN, MAP_BYTES, encode_map

_MASK = (1 << 64) - 1

Pair = tuple[int, int, int, int, int, int]
"""Two values that must not overlap, each with the offsets of its first byte and of the byte after its last."""


class _Attribute(ctypes.Structure):
    """The driver's CUlaunchAttribute, with the kind of value we use."""

    _fields_ = [("id", ctypes.c_uint32), ("pad", ctypes.c_uint32), ("value", ctypes.c_int32), ("rest", ctypes.c_uint32 * 15)]


class _Step(ctypes.Structure):
    """The driver's CUlaunchConfig, and what a step has beside it."""

    _fields_ = [
        ("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3), ("shared", ctypes.c_uint32), ("pad", ctypes.c_uint32),
        ("stream", ctypes.c_uint64), ("attributes", ctypes.c_uint64), ("attribute_count", ctypes.c_uint32),
        ("end", ctypes.c_uint32),
        ("function", ctypes.c_uint64), ("parameters", ctypes.c_uint64), ("parameter_count", ctypes.c_uint64),
    ]  # fmt: skip


assert ctypes.sizeof(_Attribute) == abi.ATTRIBUTE_BYTES and ctypes.sizeof(_Step) == abi.STEP_BYTES
assert _Step.stream.offset == abi.CONFIG_STREAM and _Step.function.offset == abi.CONFIG_BYTES


@dataclass(frozen=True)
class Helpers:
    """What a form calls back for."""

    make: Callable[[int], object] | None
    """Results for a stream; None where they are given."""
    take: Callable[[int, int], Workspace]
    """So many bytes of scratch memory for a stream."""


class LaunchRecord:
    """One record and what it points to. Lives as long as the launcher it was added to."""

    def __init__(
        self, program: CudaProgram, sizes: Mapping[str, int], keys: bytes, numbers: Sequence[str], apart: Sequence[Pair],
        helpers: Helpers,
    ) -> None:  # fmt: skip
        self.program = program
        self._sizes = dict(sizes)
        self._plan = program.plan(sizes)
        self._kept: list[object] = []
        self._take = helpers.take
        self._way = 0
        record = self._record = (ctypes.c_uint64 * (abi.FORM_BYTES // 8))()
        self.address = ctypes.addressof(record)
        self._set(abi.FORM_KEYS, self._words(memoryview(keys).cast("Q").tolist()))
        self._set(abi.FORM_CONTEXT, program.device.context_address)
        self._set(abi.FORM_DEVICE, program.device.ordinal)
        self._set_object(abi.FORM_ORDINAL, program.device.ordinal)
        self._set_scratch()
        self._set_maps()
        self._set_steps()
        self._set(abi.FORM_APART, self._words([word for pair in apart for word in pair]))
        self._set(abi.FORM_APART_COUNT, len(apart))
        self._set_scalars(numbers)
        self._set_object(abi.FORM_MAKE, helpers.make)
        self._set_object(abi.FORM_FAIL, self._fail)
        self._set_object(abi.FORM_ASK, program.scalar_bits)

    # -- the record ---------------------------------------------------------------------------------------------

    def _set(self, field: int, value: int) -> None:
        self._record[field // 8] = value

    def _set_object(self, field: int, value: object) -> None:
        if value is not None:
            self._kept.append(value)
            self._set(field, id(value))

    def _words(self, words: Sequence[int]) -> int:
        """The address of a copy of these."""
        made = (ctypes.c_uint64 * max(1, len(words)))(*[word & _MASK for word in words])
        self._kept.append(made)
        return ctypes.addressof(made)

    def _set_scratch(self) -> None:
        self._set(abi.FORM_SCRATCH, self._words(self._plan.scratch))
        self._set(abi.FORM_SCRATCH_COUNT, len(self._plan.scratch))
        if self._plan.scratch_bytes:
            self._set_object(abi.FORM_TAKE, self._take_scratch)

    def _set_steps(self) -> None:
        steps = (_Step * max(1, len(self._plan.steps)))()
        slots = self.program.slots
        first_scratch = len(slots) - len(self._plan.scratch)
        most, maps = 1, 0
        for step, (kernel, x, y, z, extended) in zip(steps, self._plan.steps, strict=False):
            rule = kernel.launch
            step.grid[:], step.block[:], step.shared = (x, y, z), (rule.threads, 1, 1), rule.shared_bytes
            step.function = self.program.function_address(rule.entry)
            if extended is not None:
                own = _Attribute(attribute(rule), 0, 1)
                self._kept.append(own)
                step.attributes, step.attribute_count = ctypes.addressof(own), 1
            places: list[int] = []
            for name in rule.args:
                checked = name == FAILURE
                places += (abi.BASE_NOWHERE, self._words([self.program.failure])) if checked else _place(slots[name], first_scratch)
            for name in rule.sizes:
                places += (abi.BASE_NOWHERE, self._words([self._sizes[name]]))
            for _ in rule.maps:
                places += (abi.BASE_MAPS, MAP_BYTES * maps)
                maps += 1
            step.parameters, step.parameter_count = self._words(places), len(places) // 2
            most = max(most, len(places) // 2)
        self._kept.append(steps)
        self._set(abi.FORM_STEPS, ctypes.addressof(steps))
        self._set(abi.FORM_STEP_COUNT, len(self._plan.steps))
        self._set(abi.FORM_POINTERS, most)

    def _set_maps(self) -> None:
        launches = [step[0].launch for step in self._plan.steps]
        self._maps = [map_ for launch in launches for map_ in launch.maps]
        if not self._maps:
            return
        self._mapped = list(dict.fromkeys(map_.array for map_ in self._maps))
        slots = self.program.slots
        first_scratch = len(slots) - len(self._plan.scratch)
        count = len(self._mapped)
        self._map_start = -(-8 * count // MAP_ALIGN) * MAP_ALIGN
        self._entry_bytes = self._map_start + MAP_BYTES * len(self._maps)
        entries = abi.MAP_SETS * abi.MAP_WAYS
        self._table = (ctypes.c_char * (entries * self._entry_bytes))()
        self._table_start = ctypes.addressof(self._table)
        for entry in range(entries):
            ctypes.c_uint64.from_address(self._table_start + entry * self._entry_bytes).value = abi.NO_ADDRESS
        places = [word for name in self._mapped for word in _place(slots[name], first_scratch)]
        self._set(abi.FORM_MAP_COUNT, count)
        self._set(abi.FORM_MAP_PLACES, self._words(places))
        self._set(abi.FORM_MAP_TABLE, self._table_start)
        self._set(abi.FORM_MAP_ENTRY, self._entry_bytes)
        self._set(abi.FORM_MAP_START, self._map_start)
        self._set(abi.FORM_MAP_BYTES, MAP_BYTES * len(self._maps))
        self._set_object(abi.FORM_ENCODE, self._encode)

    def _set_scalars(self, kinds: Sequence[str]) -> None:
        scalars = [p for p in self.program.artifact.inputs if isinstance(p, ScalarParam)]
        words = [word for param, kind in zip(scalars, kinds, strict=True) for word in _rule(kind, param.dtype)]
        self._set(abi.FORM_SCALARS, self._words(words))

    # -- called from machine code -------------------------------------------------------------------------------

    def _take_scratch(self, stream: int) -> Workspace:
        return self._take(self._plan.scratch_bytes, stream)

    def _encode(self, chosen: int, addresses: tuple[int, ...]) -> None:
        """Put the maps of arrays at these addresses into a set of the table, in place of those that came first."""
        found = dict(zip(self._mapped, addresses, strict=True))
        maps = b"".join(encode_map(self.program.device, map_, found[map_.array], self._sizes) for map_ in self._maps)
        self._way = (self._way + 1) % abi.MAP_WAYS
        start = self._table_start + (chosen * abi.MAP_WAYS + self._way) * self._entry_bytes
        ctypes.memmove(start + self._map_start, maps, len(maps))
        ctypes.memmove(start, (ctypes.c_uint64 * len(addresses))(*addresses), 8 * len(addresses))

    def _fail(self, step: int, status: int, stream: int) -> None:
        raise self.program.launch_error(self._plan.steps[step], status)

    # -- for Python ---------------------------------------------------------------------------------------------

    def launches(self) -> list[tuple[int, str, int]]:
        """Stream, name and epoch of the kernels launched last; launches on other streams before these count for any stream."""
        mark, stream, others = (self._record[field // 8] for field in (abi.FORM_MARK, abi.FORM_STREAM, abi.FORM_OTHERS))
        seen = [(s, epoch) for s, epoch in ((stream, mark), (SEVERAL, others)) if epoch]
        return [(s, step[0].launch.entry, epoch) for s, epoch in seen for step in self._plan.steps]

    def release(self) -> None:
        """Nobody will use the record again: let go of what it calls, which refers back here."""
        self._kept.clear()


def _place(slot: int, first_scratch: int) -> tuple[int, int]:
    """Where the value of a slot is during a call."""
    return (abi.BASE_VALUES, 8 * slot) if slot < first_scratch else (abi.BASE_SCRATCH, 8 * (slot - first_scratch))


def _rule(kind: str, dtype: DType) -> tuple[int, int, int]:
    """How a number of a kind becomes one of a dtype."""
    if dtype.is_float:
        wide, single = (abi.AS_F64, abi.AS_F32) if kind == abi.FLOAT else (abi.INTEGER_AS_F64, abi.INTEGER_AS_F32)
        return {"f64": wide, "f32": single}.get(dtype.name, abi.ASKED), 0, 0
    if kind == abi.FLOAT or (dtype.is_bool and kind != abi.BOOL):
        return abi.ASKED, 0, 0
    if dtype.is_bool:
        return abi.AS_INTEGER, 0, 1
    return abi.AS_INTEGER, int(dtype.min_value), min(int(dtype.max_value), (1 << 63) - 1)
