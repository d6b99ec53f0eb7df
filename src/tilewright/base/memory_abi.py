"""What the machine code that hands out device memory and the runtime agree on: layouts of their structs and of two Python classes.

In: nothing; out: offsets in bytes. An *arena* is the state of one memory pool, a *record* one piece of memory, which is either in a
free list or held by a block. Slots of a class lie behind the object header in the order of their names; the runtime compares that
with real objects before any code relies on it.
"""

from __future__ import annotations

from tilewright.base.record import record

BLOCK_SLOTS = ("_exports", "_token", "arena", "freed", "host", "nbytes", "pointer", "recent", "stream", "trace", "users")
ARRAY_SLOTS = ("_pointer", "base", "device", "dtype", "form", "owner", "readonly", "shape", "strides")

# An arena.
IN_USE, CACHED, PEAK, TAKEN, RETURNED = 0, 8, 16, 24, 32
DEFERRED = 40
"""List of records given back that other streams used; the next taker puts them in order."""
BYPASS = 48
"""While it is not 0 the machine code hands out nothing, and every request takes the general path."""
ARENA_OBJECT, DEVICE_OBJECT = 56, 64
"""The Python objects behind it; borrowed."""
DTYPES = 72
"""Address of pairs (dtype object, bytes of an element), the last with a null."""
STREAMS = 80
"""Pairs (stream, address of its free lists, one word per size class), the last with a null address."""
MOST_STREAMS = 31
ARENA_BYTES = STREAMS + 16 * (MOST_STREAMS + 1)

# A record.
NEXT, HEAD, SIZE, FOREIGN, ARENA = 0, 8, 16, 24, 32
"""`HEAD` is the address of the free list it belongs to; `FOREIGN` is not 0 when other streams used it."""
POINTER_OBJECT, SIZE_OBJECT, STREAM_OBJECT = 40, 48, 56
"""Its numbers as Python integers, kept alive by the record's owner."""
RECORD_BYTES = 64

# The table of types that offer DLPack's exchange functions, and what imported tensors become.
IMPORT_DTYPES = 0
"""Address of pairs (code, bits and lanes as DLPack has them, dtype object), the last with a null object."""
IMPORT_DEVICES = 8
"""Address of as many device objects as `IMPORT_DEVICE_COUNT` says."""
IMPORT_DEVICE_COUNT = 16
IMPORT_TYPES = 24
"""Entries of four words (type, tensor reader, stream reader, getter of `requires_grad` or null), the last with a null type."""
MOST_TYPES = 8
IMPORT_BYTES = IMPORT_TYPES + 32 * (MOST_TYPES + 1)

SMALLEST = 512
FINE = 8192
"""Up to here size classes are multiples of the smallest, beyond there are eight per power of two."""
LARGEST = 1 << 30
"""The largest size machine code serves."""
CLASSES = FINE // SMALLEST + 8 * (30 - 13)

CAPSULE = b"tilewright.memory"


@record
class SizeClass:
    """The bytes reserved for a request, and the number of its free list; -1 beyond `LARGEST`."""

    nbytes: int
    index: int


_HUGE_STEP = 2 << 20


def size_class(nbytes: int) -> SizeClass:
    """The class of a request of at least one byte."""
    last = nbytes - 1
    if nbytes <= FINE:
        return SizeClass((last // SMALLEST + 1) * SMALLEST, last // SMALLEST)
    if nbytes > LARGEST:
        return SizeClass((last // _HUGE_STEP + 1) * _HUGE_STEP, -1)
    bits = last.bit_length()
    part = last >> (bits - 4)
    return SizeClass((part + 1) << (bits - 4), FINE // SMALLEST + 8 * (bits - 14) + part - 8)


def slot(slots: tuple[str, ...], name: str, header: int) -> int:
    """Offset of a slot in an object whose header takes `header` bytes."""
    return header + 8 * slots.index(name)
