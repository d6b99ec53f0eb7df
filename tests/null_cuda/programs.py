"""Modules, functions and launches. In: PTX and the bytes of a launch; out: a kernel's parameters, copied, and the limits it must keep.

The parameters' sizes are read from the PTX, so they are copied when the launch is queued, as the driver does it: what the caller
does with its block afterwards is not seen. A PTX without any `.entry` is a placeholder of a test: it has every function, and
since nobody knows their parameters, such launches run at once and read the caller's block.
"""

from __future__ import annotations

import ctypes
import re
import struct
from dataclasses import dataclass, field

from null_cuda.state import INVALID_VALUE, Context, Handle, Refused

ISA = {
    (11, 8): (7, 8), (12, 0): (8, 0), (12, 1): (8, 1), (12, 2): (8, 2), (12, 3): (8, 3), (12, 4): (8, 4), (12, 5): (8, 5), (12, 6): (8, 5),
    (12, 7): (8, 6), (12, 8): (8, 7), (12, 9): (8, 8), (13, 0): (9, 0), (13, 1): (9, 1), (13, 2): (9, 2), (13, 3): (9, 3), (13, 4): (9, 4),
}  # fmt: skip
"""The newest PTX a driver of each version takes."""
INVALID_PTX, UNSUPPORTED_PTX, BAD_CLUSTER = 218, 222, 912
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*(?:\(([^)]*)\))?([^{]*)\{")
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(?:[busf])(\d+)\s+(?:\.ptr\b[^,]*?\s)?([\w$%]+)\s*(?:\[(\d+)\])?")
_BOUND = re.compile(r"\.(reqntid|maxntid|reqnctapercluster|maxclusterrank)\s+([\d,\s]+)")
_VARIABLE = re.compile(r"\.visible\s+\.global\s+(?:\.align\s+\d+\s+)?\.[busf](\d+)\s+([\w$]+)\s*(?:\[(\d+)\])?")
CONFIG = struct.Struct("<7I4xQQI4x")
"""CUlaunchConfig: grid, block and shared memory, stream, attributes, their number."""
ATTRIBUTE = struct.Struct("<I4x64s")
_CLUSTER, _COOPERATIVE, _DEPENDENT = 4, 2, 6
_KNOWN_ATTRIBUTES = frozenset(range(16))


@dataclass(frozen=True)
class Entry:
    """What PTX says of one kernel."""

    name: str
    sizes: tuple[int, ...] | None
    """Bytes of each parameter; None where nobody knows."""
    bounds: dict[str, int] = field(default_factory=dict)


def read_entries(ptx: str) -> dict[str, Entry]:
    """Every kernel of a PTX text."""
    found: dict[str, Entry] = {}
    for name, parameters, rest in _ENTRY.findall(re.sub(r"//[^\n]*", "", ptx)):
        pieces = [piece for piece in parameters.split(",") if piece.strip()]
        sizes = []
        for piece in pieces:
            match = _PARAMETER.search(piece + " ")
            if match is None:
                raise Refused(INVALID_PTX, f"the parameter '{piece.strip()}' of {name} cannot be read")
            sizes.append(int(match.group(1)) // 8 * int(match.group(3) or 1))
        bounds: dict[str, int] = {}
        for kind, numbers in _BOUND.findall(rest):
            total = 1
            for number in numbers.replace(" ", "").strip().split(","):
                total *= int(number)
            bounds[kind] = total
        found[name] = Entry(name, tuple(sizes), bounds)
    return found


class Module(Handle):
    kind = "module"

    def __init__(self, context: Context, number: int, ptx: str) -> None:
        super().__init__(context, number)
        self.ptx = ptx
        self.entries = read_entries(ptx)
        self.functions: dict[str, Function] = {}
        found = _VARIABLE.findall(ptx)
        self.variables = {name: (ctypes.c_char * (int(bits) // 8 * int(count or 1)))() for bits, name, count in found}


class Function(Handle):
    kind = "function"

    def __init__(self, module: Module, number: int, entry: Entry) -> None:
        super().__init__(module.context, number)
        self.module = module
        self.entry = entry
        self.log_name = entry.name
        self.allowed: dict[str, int] = {}
        """What cuFuncSetAttribute set."""


class Parameters:
    """A copy of a launch's parameters: `table` is the address of pointers to them."""

    def __init__(self, table: int, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        offsets, total = [], 0
        for size in sizes:
            offsets.append(total)
            total += -(-size // 64) * 64
        self._room = (ctypes.c_char * (total + 64))()
        base = -(-ctypes.addressof(self._room) // 64) * 64
        self._pointers = (ctypes.c_uint64 * max(1, len(sizes)))(*(base + offset for offset in offsets))
        given = (ctypes.c_uint64 * max(1, len(sizes))).from_address(table) if sizes else ()
        for index, size in enumerate(sizes):
            if not given[index]:
                raise Refused(INVALID_VALUE, f"parameter {index} is a null pointer")
            ctypes.memmove(base + offsets[index], given[index], size)
        self.table = ctypes.addressof(self._pointers)

    def value(self, index: int) -> bytes:
        return ctypes.string_at(self._pointers[index], self.sizes[index])


@dataclass(frozen=True)
class Config:
    """A launch's shape."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    stream: int
    cluster: int = 1
    cooperative: bool = False
    dependent: bool = False


def read_config(address: int) -> Config:
    """The CUlaunchConfig at an address, by its C layout."""
    gx, gy, gz, bx, by, bz, shared, stream, attributes, count = CONFIG.unpack(ctypes.string_at(address, CONFIG.size))
    cluster, cooperative, dependent = 1, False, False
    for index in range(count):
        kind, value = ATTRIBUTE.unpack(ctypes.string_at(attributes + index * ATTRIBUTE.size, ATTRIBUTE.size))
        if kind not in _KNOWN_ATTRIBUTES:
            raise Refused(INVALID_VALUE, f"launch attribute {kind} does not exist")
        first, second, third = struct.unpack_from("<3I", value)
        if kind == _CLUSTER:
            cluster = first * second * third
            if not cluster or gx % first or gy % second or gz % third:
                raise Refused(BAD_CLUSTER)
        cooperative |= kind == _COOPERATIVE and bool(first)
        dependent |= kind == _DEPENDENT and bool(first)
    return Config((gx, gy, gz), (bx, by, bz), shared, stream, cluster, cooperative, dependent)


class LaunchValue:
    """The union of a launch attribute's values."""

    def __init__(self) -> None:
        self.programmaticStreamSerializationAllowed = 0
        self.cooperative = 0
        self.priority = 0
        self.clusterDim = ClusterDim()


class ClusterDim:
    def __init__(self) -> None:
        self.x = self.y = self.z = 0


class LaunchAttribute:
    """CUlaunchAttribute of the bindings."""

    def __init__(self) -> None:
        self.id: int = 0
        self.value = LaunchValue()

    def pack(self) -> bytes:
        kind, value = int(self.id), self.value
        if kind == _CLUSTER:
            content = struct.pack("<3I", value.clusterDim.x, value.clusterDim.y, value.clusterDim.z)
        elif kind == _COOPERATIVE:
            content = struct.pack("<I", value.cooperative)
        elif kind == _DEPENDENT:
            content = struct.pack("<I", value.programmaticStreamSerializationAllowed)
        else:
            content = struct.pack("<i", value.priority)
        return ATTRIBUTE.pack(kind, content)


class LaunchConfig:
    """CUlaunchConfig of the bindings."""

    def __init__(self) -> None:
        self.gridDimX = self.gridDimY = self.gridDimZ = 0
        self.blockDimX = self.blockDimY = self.blockDimZ = 0
        self.sharedMemBytes = 0
        self.hStream: int | None = 0
        self.attrs: list[LaunchAttribute] = []
        self.numAttrs = 0

    def read(self) -> Config:
        """What the driver sees of it."""
        packed = b"".join(attribute.pack() for attribute in self.attrs[: self.numAttrs])
        attributes = ctypes.create_string_buffer(packed, len(packed) + 1)
        numbers = (self.gridDimX, self.gridDimY, self.gridDimZ, self.blockDimX, self.blockDimY, self.blockDimZ, self.sharedMemBytes)
        whole = ctypes.create_string_buffer(CONFIG.pack(*numbers, int(self.hStream or 0), ctypes.addressof(attributes), self.numAttrs))
        return read_config(ctypes.addressof(whole))
