"""Free lists in structs that machine code reads and writes, and the code itself. In: an object file; out: arenas, and array makers.

The code (`machine_code` says where it comes from) takes blocks, makes arrays and wraps foreign tensors without a line of Python; see
`codegen.host.allocator` for what it does and `base.memory_abi` for the structs. Python and the code share an arena, and the GIL is the lock:
Python therefore changes lists and accounts only by calls of the code that keep it. Where objects do not look as the code expects
(another interpreter, a build without the GIL), `available` is False and pools use `device_memory.PythonArena`.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import sysconfig
from collections.abc import Callable
from typing import Any

from tilewright.base import dtypes
from tilewright.base import memory_abi as abi
from tilewright.base.errors import CompilerBug
from tilewright.base.forks import fork_safe_lock
from tilewright.runtime.core import machine_code, streams
from tilewright.runtime.core.objects import ObjectCode, bind_symbol
from tilewright.runtime.cpu import pool as cpu_pool
from tilewright.runtime.memory.device_array import DeviceArray
from tilewright.runtime.memory.device_memory import EVERY_STREAM, MemoryBlock, Piece, Retire

_METH_O, _METH_FASTCALL = 0x08, 0x80
_WORD = ctypes.c_uint64

_FUNCTIONS = (
    "PyType_GenericAlloc", "PyCapsule_New", "PyCapsule_SetContext", "PyCapsule_GetContext", "PyCapsule_GetPointer",
    "PyLong_AsLongLong", "PyLong_FromLongLong", "PyLong_FromUnsignedLongLong", "PyTuple_New",
    "PyErr_Occurred", "PyErr_Clear", "Py_IncRef", "Py_DecRef",
)  # fmt: skip
_ZERO, _NO_ITEMS, _UNIT_STRIDES = 0, (), (1,)
_OBJECTS: dict[str, object] = {
    "_Py_NoneStruct": None, "_Py_FalseStruct": False, "PyLong_Type": int, "PyTuple_Type": tuple,
    "tilewright_block_type": MemoryBlock, "tilewright_array_type": DeviceArray, "tilewright_zero": _ZERO,
    "tilewright_no_items": _NO_ITEMS, "tilewright_unit_strides": _UNIT_STRIDES,
}  # fmt: skip


class _MethodDefinition(ctypes.Structure):
    """CPython's PyMethodDef."""

    _fields_ = [("name", ctypes.c_char_p), ("function", ctypes.c_void_p), ("flags", ctypes.c_int), ("doc", ctypes.c_char_p)]


class MemoryWords:
    """Some words of memory at a fixed address, zero at first."""

    def __init__(self, nbytes: int) -> None:
        self._memory = (_WORD * (nbytes // 8))()
        self.address = ctypes.addressof(self._memory)

    def __getitem__(self, offset: int) -> int:
        return self._memory[offset // 8]

    def __setitem__(self, offset: int, value: int) -> None:
        self._memory[offset // 8] = value


class _Record(MemoryWords):
    """One piece of memory. `numbers` keeps the integers alive that blocks get references to."""

    def __init__(self, pointer: int, size: int, stream: int, head: int, arena: int) -> None:
        super().__init__(abi.RECORD_BYTES)
        self[abi.SIZE], self[abi.ARENA] = size, arena
        self.pointer, self.size = pointer, size
        self[abi.POINTER_OBJECT], self[abi.SIZE_OBJECT] = id(pointer), id(size)
        self.set_home(stream, head)

    def set_home(self, stream: int, head: int) -> None:
        self.stream = stream
        self[abi.STREAM_OBJECT] = id(stream)
        self[abi.HEAD] = head


class _AllocatorCode:
    """The loaded functions. Never unloaded: blocks may be dropped as late as the end of the interpreter."""

    def __init__(self, data: bytes) -> None:
        self.imports = MemoryWords(abi.IMPORT_BYTES)
        for name in _FUNCTIONS:
            bind_symbol(name, ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value or 0)
        for name, value in _OBJECTS.items():
            bind_symbol(name, id(value))
        bind_symbol("tilewright_imports", self.imports.address)
        bind_symbol("tilewright_streams_open", ctypes.addressof(streams.STREAM_NAMED))
        self.objects = ObjectCode(data)
        self._definitions = {
            name: _MethodDefinition(name.encode(), self.objects.address(f"tilewright_memory_{name}"), flags, None)
            for name, flags in (("take", _METH_FASTCALL), ("make", _METH_FASTCALL), ("wrap", _METH_O))
        }
        # PYFUNCTYPE keeps the GIL, which is what makes these steps whole.
        self.swap = ctypes.PYFUNCTYPE(ctypes.c_uint64, ctypes.c_uint64)(self.objects.address("tilewright_memory_swap"))
        self.push = ctypes.PYFUNCTYPE(None, ctypes.c_uint64)(self.objects.address("tilewright_memory_push"))
        self.add = ctypes.PYFUNCTYPE(None, ctypes.c_uint64, ctypes.c_int64)(self.objects.address("tilewright_memory_add"))
        self.hold = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_uint64)(self.objects.address("tilewright_memory_hold"))
        self.find = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_uint64, ctypes.c_int64, ctypes.c_int64)(
            self.objects.address("tilewright_memory_find")
        )
        self.move = self.objects.address("tilewright_memory_move")
        self.dtypes = MemoryWords(16 * (len(dtypes.ALL) + 1))
        for number, dtype in enumerate(dtypes.ALL):
            self.dtypes[16 * number], self.dtypes[16 * number + 8] = id(dtype), dtype.itemsize

    def function(self, name: str, bound: object) -> Callable[..., Any]:
        """A builtin function with `bound` as its first argument."""
        create = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)(
            ctypes.cast(ctypes.pythonapi.PyCFunction_NewEx, ctypes.c_void_p).value or 0
        )
        made: Callable[..., Any] = create(ctypes.addressof(self._definitions[name]), bound, None)
        return made


_loading = fork_safe_lock()
_loaded: _AllocatorCode | None = None


def code() -> _AllocatorCode:
    """The process's code."""
    global _loaded
    if _loaded is None:
        with _loading:
            if _loaded is None:
                build = machine_code.builder("memory")
                if build is None:
                    raise CompilerBug.at("TW040", "no code for device memory was provided before a pool was made")
                made = _AllocatorCode(build())
                ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", ctypes.pythonapi))(made)
                _loaded = made
    return _loaded


_MOVE_PIECE = 128 << 10


def move(target: int, source: int, nbytes: int) -> None:
    """Copy bytes between two places of the host, by as many threads as pay."""
    slots = (_WORD * 4)(target, source, nbytes, _MOVE_PIECE)
    cpu_pool.pool().launch(code().move, ctypes.addressof(slots), -(-nbytes // _MOVE_PIECE), _MOVE_PIECE)


def available() -> bool:
    """Whether there is machine code, and it can read and make this interpreter's objects."""
    return machine_code.builder("memory") is not None and _readable()


@functools.cache
def _readable() -> bool:
    # Builds without the lock begin with 3.13; the table that says so takes a while to load.
    if sys.implementation.name != "cpython" or (sys.version_info >= (3, 13) and sysconfig.get_config_var("Py_GIL_DISABLED")):
        return False
    if ctypes.sizeof(ctypes.c_void_p) != 8 or sys.byteorder != "little":
        return False
    return _laid_out(MemoryBlock, abi.BLOCK_SLOTS) and _laid_out(DeviceArray, abi.ARRAY_SLOTS)


def _laid_out(kind: type, slots: tuple[str, ...]) -> bool:
    """Whether the slots of a class are where the code takes them to be."""
    header = object.__basicsize__
    if tuple(sorted(slots)) != slots or kind.__basicsize__ != header + 8 * len(slots):
        return False
    sample: Any = object.__new__(kind)
    values = [object() for _ in slots]
    for name, value in zip(slots, values, strict=True):
        kind.__dict__[name].__set__(sample, value)
    places = [ctypes.c_uint64.from_address(id(sample) + abi.slot(slots, name, header)).value for name in slots]
    return places == [id(value) for value in values]


class NativeArena:
    """An arena whose free lists are structs."""

    def __init__(self, retire: Retire, device: object = None) -> None:
        self._retire = retire
        self._code = code()
        self._device = device
        self._words = MemoryWords(abi.ARENA_BYTES)
        self._words[abi.ARENA_OBJECT] = id(self)
        self._words[abi.DEVICE_OBJECT] = id(device)
        self._words[abi.DTYPES] = self._code.dtypes.address
        self._records: dict[int, _Record] = {}
        """By address of the memory."""
        self._at: dict[int, _Record] = {}
        """By address of the record."""
        self._tables: dict[int, MemoryWords] = {}
        self._other: dict[tuple[int, int], MemoryWords] = {}
        """Free lists that machine code does not know: huge sizes, and streams beyond those it has room for."""
        self._users: dict[int, set[int]] = {}
        self._unsettled: list[_Record] = []

    def taker(self) -> Callable[[int, int], MemoryBlock | None]:
        """`take` as machine code, for sizes up to `memory_abi.LARGEST`. It holds the arena, which does not hold it."""
        return self._code.function("take", (self._words.address, self))

    def maker(self) -> Callable[[tuple[int, ...], dtypes.DType, int], DeviceArray | None]:
        """`make(shape, dtype, stream)` as machine code: an array in a block just taken, or None."""
        return self._code.function("make", (self._words.address, self))

    def take(self, nbytes: int, stream: int) -> MemoryBlock | None:
        """A free block; None where there is none, or something has to be seen to first."""
        if nbytes <= abi.LARGEST and (stream in self._tables or len(self._tables) < abi.MOST_STREAMS):
            found: MemoryBlock | None = self._code.find(self._words.address, nbytes, stream)
            return found
        if self._words[abi.BYPASS] or self._words[abi.DEFERRED]:
            return None
        chain = self._code.swap(self._head(nbytes, stream))
        if not chain:
            return None
        first, *rest = self._chain(chain)
        for record in rest:
            self._code.push(record.address)
        self._count(abi.CACHED, -first.size)
        return self._hold(first)

    def adopt(self, pointer: int, size: int, stream: int) -> MemoryBlock:
        """New memory of the device, in use at once."""
        record = _Record(pointer, size, stream, self._head(size, stream), self._words.address)
        self._records[pointer] = self._at[record.address] = record
        return self._hold(record)

    def _hold(self, record: _Record) -> MemoryBlock:
        made: MemoryBlock = self._code.hold(record.address)
        return made

    def settle(self, order: Callable[[int, int], None]) -> None:
        """Put what other streams used in order, and on its free list."""
        self._unsettled += self._chain(self._code.swap(self._words.address + abi.DEFERRED))
        while self._unsettled:
            # Out of the list first: `order` may collect garbage, and so come back here.
            record = self._unsettled.pop()
            try:
                for user in self._users.get(record.pointer, ()):
                    order(record.stream, user)
            except BaseException:
                self._unsettled.append(record)
                raise
            self._users.pop(record.pointer, None)
            record[abi.FOREIGN] = 0
            self._code.push(record.address)

    def note(self, pointer: int, stream: int) -> None:
        """A stream that is not the block's home uses it."""
        self._users.setdefault(pointer, set()).add(stream)
        self._records[pointer][abi.FOREIGN] = 1

    def free_pieces(self) -> list[Piece]:
        """All that is free."""
        found = [record for head in self._heads() for record in self._peek(head)]
        return [(record.pointer, record.size, record.stream) for record in found]

    def detach(self, stream: int) -> list[Piece]:
        """Take everything free of one stream out of the arena."""
        found: list[Piece] = []
        for head in self._heads(stream):
            for record in self._chain(self._code.swap(head)):
                del self._records[record.pointer], self._at[record.address]
                self._count(abi.CACHED, -record.size)
                found.append((record.pointer, record.size, record.stream))
        return found

    def rename(self, old: int, new: int) -> None:
        """What belongs to one stream, free or in use, belongs to another from now on."""
        free = [record for head in self._heads(old) for record in self._chain(self._code.swap(head))]
        for record in self._records.values():
            if record.stream == old:
                record.set_home(new, self._head(record.size, new))
        for record in free:
            self._code.push(record.address)

    def set_bypass(self, on: bool) -> None:
        """While on, machine code hands out nothing, and neither does `take`."""
        self._words[abi.BYPASS] = int(on)

    def counts(self) -> tuple[int, int, int, int, int]:
        """Bytes in use, cached and at the peak; blocks taken and returned."""
        words = self._words
        return words[abi.IN_USE], words[abi.CACHED], words[abi.PEAK], words[abi.TAKEN], words[abi.RETURNED]

    def reset_peak(self) -> None:
        """The peak is what is in use now."""
        self._words[abi.PEAK] = self._words[abi.IN_USE]

    def _count(self, account: int, change: int) -> None:
        self._code.add(self._words.address + account, change)

    def _head(self, nbytes: int, stream: int) -> int:
        """Address of the free list for a size and stream; made where there is none yet."""
        size = abi.size_class(nbytes)
        table = self._tables.get(stream)
        number = len(self._tables)
        if size.index < 0 or (table is None and number == abi.MOST_STREAMS):
            # Machine code knows neither; Python finds them by size.
            return self._other.setdefault((size.nbytes, stream), MemoryWords(8)).address
        if table is None:
            table = self._tables[stream] = MemoryWords(8 * abi.CLASSES)
            at = abi.STREAMS + 16 * number
            # The stream before its table: a null table ends the list.
            self._words[at] = stream
            self._words[at + 8] = table.address
        return table.address + 8 * size.index

    def _heads(self, stream: int | None = None) -> list[int]:
        """Addresses of all free lists, or of those of one stream."""
        tables = [table for home, table in self._tables.items() if stream in (None, home)]
        found = [table.address + 8 * index for table in tables for index in range(abi.CLASSES)]
        return found + [head.address for (_, home), head in self._other.items() if stream in (None, home)]

    def _chain(self, first: int) -> list[_Record]:
        """The records of a list that was taken off."""
        found: list[_Record] = []
        while first:
            found.append(self._at[first])
            first = found[-1][abi.NEXT]
        return found

    def _peek(self, head: int) -> list[_Record]:
        """The records of a free list, which stays as it is."""
        if not _WORD.from_address(head).value:
            return []
        found = self._chain(self._code.swap(head))
        for record in reversed(found):
            self._code.push(record.address)
        return found

    def __del__(self) -> None:
        users = self._users
        self._retire([(r.pointer, r.size, EVERY_STREAM if users.get(r.pointer) else r.stream) for r in self._records.values()])
