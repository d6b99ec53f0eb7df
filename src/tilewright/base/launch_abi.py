"""What the machine code that launches CUDA kernels and the runtime agree on: records in memory, and which calls a stub is for.

A **stub** is a CPython function made for a `Pattern`: how many arguments, what each one is. It reads its arguments into
*values* (one 8-byte slot each: addresses of arrays, results last, then scalars) and *keys* (words that hold whatever decides
about code, grid and sizes), and looks for a **form** with these keys: a record that says all that is left to do. The runtime
adds forms; a call for which there is none is handed on. The **state** belongs to one stub of one kernel. Offsets are in bytes;
every field has 8 unless said.

A parameter of a kernel is given as two words: one of the bases below and an offset from it.
"""

from __future__ import annotations

from tilewright.base.record import record

CALL = "tilewright_cuda_call"
PROBE = "tilewright_cuda_probe"
"""Takes the arguments of a call and gives bytes: its values and keys, or None where it would refuse them."""
WAIT = "tilewright_cuda_wait"
"""Waits for a device; `self` is the address of a wait record. True when all went well, else the driver's status; None where it
did nothing."""
FIND, INSERT, RUN = "tilewright_cuda_find", "tilewright_cuda_insert", "tilewright_cuda_run"
SCALAR, APART, NAMED, NOTE = "tilewright_cuda_scalar", "tilewright_cuda_apart", "tilewright_cuda_named", "tilewright_cuda_note"

# -- the state of a stub --------------------------------------------------------------------------------------------
STATE_LAST = 0
"""The form of the latest call, tried first."""
STATE_RECENT = 8
"""Address of a word where each call leaves its form; all stubs of a kernel share it."""
STATE_LAUNCH = 16
STATE_LAUNCH_EX = 24
STATE_CONTEXT = 32
"""Addresses of cuLaunchKernel, cuLaunchKernelEx and cuCtxGetCurrent…"""
STATE_TORCH_STREAM = 40
"""…and of PyTorch's `aoti_torch_get_current_cuda_stream`; 0 where there is none."""
STATE_WORDS = 48
"""How many keys a call has."""
STATE_EPOCH = 56
"""Address of the number of the next wait for the device."""
STATE_BUCKETS = 64
BUCKETS = 64
STATE_BYTES = STATE_BUCKETS + 8 * BUCKETS

# -- a wait record -------------------------------------------------------------------------------------------------
WAIT_CURRENT, WAIT_SYNCHRONIZE = 0, 8
"""Addresses of cuCtxGetCurrent and cuCtxSynchronize. From CUDA 13.0 on the latter takes the context; before, it takes nothing, and passing
it does no harm."""
WAIT_CONTEXT = 16
WAIT_LOG = 24
"""Address of two words: the number of the next wait, and that of the latest that went well."""
WAIT_BYTES = 32

# -- a form ---------------------------------------------------------------------------------------------------------
FORM_NEXT = 0
"""The next form of the same bucket."""
FORM_KEYS = 8
FORM_STEPS = 16
FORM_STEP_COUNT = 24
FORM_CONTEXT = 32
"""The context that must be current."""
FORM_MARK = 40
"""The epoch of the latest launch, on FORM_STREAM; 0 before the first."""
FORM_STREAM = 48
FORM_POINTERS = 56
"""Most parameters a step has."""
FORM_SCRATCH = 64
FORM_SCRATCH_COUNT = 72
"""Scratch arrays and their offsets in the memory `take` gives."""
FORM_APART = 80
FORM_APART_COUNT = 88
"""Pairs of values that must not overlap, see APART_BYTES."""
FORM_SCALARS = 96
"""One record for each scalar, see SCALAR_BYTES."""
FORM_MAP_COUNT = 104
"""Addresses the tensor maps depend on; 0 where there are no maps…"""
FORM_MAP_PLACES = 112
"""…and where they are: a base and an offset each."""
FORM_MAP_TABLE = 120
FORM_MAP_ENTRY = 128
"""The table of maps: `MAP_SETS` times `MAP_WAYS` entries of so many bytes: addresses, then from FORM_MAP_START on the maps."""
FORM_MAP_START = 136
FORM_MAP_BYTES = 144
FORM_ORDINAL = 152
"""A Python int."""
FORM_MAKE = 160
"""What makes the results: called with the stream; null where they are given."""
FORM_TAKE = 168
"""What takes scratch memory: called with the stream, gives (address, owner); null where none is needed."""
FORM_ENCODE = 176
"""Called with the number of a set and the addresses when there are no maps for them; puts them there."""
FORM_FAIL = 184
"""Called with the number of a step, the driver's status and the stream; raises the error."""
FORM_ASK = 192
"""Called with the number of a scalar and the scalar where machine code cannot convert it; gives the bits of its slot."""
FORM_DEVICE = 200
"""The ordinal as a plain number."""
FORM_OTHERS = 208
"""The epoch of the latest launch on another stream than that."""
FORM_BYTES = 216

MAP_SETS, MAP_WAYS = 16, 4
NO_ADDRESS = (1 << 64) - 1
"""The first address of an entry without maps."""

# -- a step of a form: CUlaunchConfig, then these ---------------------------------------------------------------------
CONFIG_STREAM = 32
CONFIG_ATTRIBUTES = 40
CONFIG_COUNT = 48
"""i32."""
CONFIG_BYTES = 56
ATTRIBUTE_BYTES = 72
STEP_FUNCTION = 56
STEP_PARAMETERS = 64
STEP_PARAMETER_COUNT = 72
STEP_BYTES = 80

BASE_VALUES, BASE_NOWHERE, BASE_SCRATCH, BASE_MAPS = range(4)
"""What an offset counts from. From nowhere: it is an address."""

# -- two arrays that must not overlap: two values, each with the offsets of its first byte and of the one after its last
APART_FIRST, APART_FIRST_LOW, APART_FIRST_HIGH, APART_SECOND, APART_SECOND_LOW, APART_SECOND_HIGH = range(0, 48, 8)
APART_BYTES = 48

# -- a scalar: what to do, and two words for it
SCALAR_RULE, SCALAR_LOW, SCALAR_HIGH = 0, 8, 16
SCALAR_BYTES = 24
AS_INTEGER = 0
"""Between the two words."""
AS_F64, AS_F32 = 1, 2
INTEGER_AS_F64, INTEGER_AS_F32 = 3, 4
ASKED = 5
"""By FORM_ASK; the words are the latest value and its bits."""

OWN, TENSOR, CHECKED_TENSOR, FLOAT, INTEGER, BOOL, SHAPING, NOTHING = "own", "tensor", "tensor?", "float", "int", "bool", "int!", "none"
"""What an argument can be: an array of ours, a tensor of PyTorch (with `?` one whose strides do not tell that it is not a negated
view), an exact Python number. A shaping one is a whole number that sizes are made of: it is a key, as the extents of arrays are."""


@record
class Slot:
    """One argument: what it is, and the rank of an array."""

    kind: str
    rank: int = 0

    @property
    def is_array(self) -> bool:
        return self.kind in (OWN, TENSOR, CHECKED_TENSOR)

    @property
    def is_number(self) -> bool:
        return not self.is_array and self.kind != NOTHING


@record
class Pattern:
    """The calls one stub is for. `results` are those given by `out=`, or those to be made where `given` is false."""

    arguments: tuple[Slot, ...]
    results: tuple[Slot, ...]
    given: bool
    written: tuple[int, ...] = ()
    """Positions of arguments that are written to, as those of kernels without results are."""


@record
class Layout:
    """Offsets of the fields a stub reads from Python objects, as found in this process."""

    array_form: int
    array_pointer: int
    array_owner: int
    array_readonly: int
    block_freed: int
    block_stream: int
    block_recent: int
    tensor: int = 0
    """Where a tensor's `at::Tensor` is; 0 without PyTorch."""
    tensor_gradient: int = 0
    """In what that holds: the word that is 0 where a tensor surely needs no gradient; 0 where PyTorch is always asked."""
    tensor_device: int = 1
    """The number PyTorch gives to the kind of device: 1 is CUDA."""
