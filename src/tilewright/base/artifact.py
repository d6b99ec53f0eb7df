"""What a code generator returns and a runtime loads: code, entry points and the rule to launch them. Plain data.

A runtime never sees IR. Sizes in launch rules are symbolic and evaluated at the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

from tilewright.base.dtypes import DType
from tilewright.base.errors import Note, UserError, UserIndexError
from tilewright.base.record import record
from tilewright.base.sizes import Size, is_number, parameter_of

FAILURE = "$failure"
"""The scratch array in which a program leaves its first access outside an array. It is zero when the program starts."""
FAILURE_FIELDS = 4
FAILURE_SITE, FAILURE_INDEX, FAILURE_EXTENT, FAILURE_FLAG = range(4)
"""What lies where in it. Sites are counted from 1 on; 0 is none. GPUs have it in memory of theirs as long as the program is loaded. There the
site is negative until the rest is written, and the flag is the address of a word of the host, or 0; who has written the rest sets it to 1."""


@record
class IndexSite:
    """One index of one access that is checked as its kernel runs."""

    kernel: str
    opcode: str
    array: str
    axis: int
    rank: int
    place: str = ""
    """`file:line:column`"""
    excerpt: str = ""


def index_error(sites: Sequence[IndexSite], site: int, index: int, extent: int, where: str = "") -> UserError:
    """The error of the access that the cell names."""
    found = sites[site - 1]
    verb = "reads" if found.opcode == "load" else "writes"
    axis = f" (axis {found.axis})" if found.rank > 1 else ""
    text = f"{found.kernel} {verb} '{found.array}' at index {index}{axis}, but its extent there is {extent}"
    if where:
        text += f", on {where}"
    if found.place:
        text += f" (at {found.place})"
    if found.excerpt:
        text += f"\n{found.excerpt}"
    error = UserIndexError.at(
        "TW050", text, help="results and arrays that were to be written hold part of the new values"
    )
    assert isinstance(error, UserError)
    return error


@record
class ArrayParam:
    """An array the caller passes ('input', or 'inout' where it is written in place), receives ('output') or never sees ('scratch')."""

    name: str
    dtype: DType
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    role: str
    align: int = 0


@record
class ScalarParam:
    name: str
    dtype: DType
    typed: bool = False
    """Whether the code is for numbers with a type of their own, as NumPy's: for those of Python there is other code."""


@record
class MapParam:
    """How the GPU's copy engine sees an array: shape and strides in elements, outermost axis first, the last stride 1; `box` is what one
    copy moves. Passed by value as 128 bytes.

    With `pixels` it is of images [n, h, w, c]: a copy moves that many boxes. Their positions run along h from `lower[0]` to
    h - 1 + `upper[0]`, `steps[0]` apart, and along w alike. `rounds`: f32 becomes tf32 on its way to shared memory."""

    array: str
    dtype: DType
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    box: tuple[int, ...]
    swizzle: int = 0
    pixels: int = 0
    lower: tuple[Size, ...] = ()
    upper: tuple[Size, ...] = ()
    steps: tuple[int, ...] = ()
    rounds: bool = False


@record
class Launch:
    """Run `entry` over `grid` blocks. `args` names arrays and scalars in parameter order, then come `sizes` as i64, then `maps`."""

    entry: str
    args: tuple[str, ...]
    sizes: tuple[str, ...]
    grid: tuple[Size, ...]
    threads: int = 1
    shared_bytes: int = 0
    work: Size = field(default_factory=lambda: Size.of(1))
    """Elements touched by one block, to choose the grain and whether threads pay."""
    maps: tuple[MapParam, ...] = ()
    cluster: int = 1
    """Blocks of one cluster, along x."""
    dependent: bool = False
    """May start before the launch before it has ended; it waits for it itself."""
    place: str = ""
    """Where the kernel's source is: `file:line:column`, for errors that come later than the call."""
    watchdog: int = 0
    """Nanoseconds after which its open-ended loops stop it; 0 where they do not."""
    cooperative: bool = False
    """Its blocks wait for each other: they must all run at once."""
    persistent: bool = False
    """`grid` is the most blocks it has use for, along x; fewer, as many as run at once, share out the work."""
    asserts: tuple[tuple[str, str], ...] = ()
    """Its assertions, in order: where each is (`file:line:column`), and its text."""
    values: tuple[Size, ...] = ()
    """Sizes that the host computes for the kernel, where its code has no arithmetic for them; then these are passed instead of `sizes`."""
    narrow: tuple[Size, ...] = ()
    """Bounds of the indices that its code computes in 32 bits: at a call each must be below 2^31."""
    turns: Size = field(default_factory=lambda: Size.of(0))
    """Iterations that the loops of one thread make at most, where the target has a limit of them (`Target.max_turns`)."""
    open_loops: bool = False
    """Whether it has loops beside these whose end is known only as it runs."""


@record
class CallCheck:
    """`left relation right` (eq, le, lt) must hold at a call."""

    left: Size
    relation: str
    right: Size
    message: str
    place: str = ""
    excerpt: str = ""
    code: str = "TW004"


@record
class SizeBinding:
    name: str
    array: str
    axis: int
    stride: bool = False


SMALL_EXTENT = 16
"""Extents up to this may be part of a CPU's code."""
SMALL_MANY = 1024
"""Elements of the arguments from which on such code is worth compiling."""


@record
class SmallSums:
    """A kernel with sums that may be short. Axes are those of arguments: (array, number)."""

    sums: tuple[tuple[str, int], ...]
    """The axes that say how long its sums are: where all are small, code for these very extents is better."""
    around: tuple[tuple[str, int], ...]
    """Axes of the loops around the sums, which are part of such code where they are small."""
    most: int = SMALL_EXTENT
    """How small those of `sums` have to be. 1: they are not of sums, but the rows or columns of a product, which with one of them is a matrix times a vector."""


@record
class Artifact:
    """Compiled code of one program for one target."""

    name: str
    target: str
    """Target name, e.g. `sm_90a`."""
    kind: str
    """'object' (native, relocatable), 'ptx'."""
    code: bytes
    inputs: tuple[ArrayParam | ScalarParam, ...]
    outputs: tuple[ArrayParam, ...]
    scratch: tuple[ArrayParam, ...]
    launches: tuple[Launch, ...]
    bindings: tuple[SizeBinding, ...]
    checks: tuple[CallCheck, ...]
    facts: tuple[tuple[str, int], ...] = ()
    """Divisors of size names this code relies on; a call where one does not hold needs other code."""
    alias_safe: bool = False
    """Every output element depends only on the input elements at the same place: `out=` may be an input itself."""
    host: bytes = b""
    """The host part: an object with the CPython entry stub for this signature; empty where there is none."""
    key: str = ""
    """Content hash, also the cache key."""
    computed: tuple[tuple[str, Size], ...] = ()
    """Sizes that the call computes from its numbers and its arrays: a name and what it is. None is made of another one."""
    absent: tuple[int, ...] = ()
    """Where None stands among the arguments of a call; `inputs` are the others."""
    sites: tuple[IndexSite, ...] = ()
    """The indices that are checked as it runs; the scratch array `base.artifact.FAILURE` says which one lay outside."""
    schedule: str = ""
    """The schedules chosen, one line per kernel, for `inspect` and logs."""
    notes: tuple[Note, ...] = ()
    """What makes it slow, for the first call to say."""
    level: str = ""
    """The optimisation level of its code (`base/levels.py`); of one that runs until a better one is compiled, `O0`."""
    small: tuple[SmallSums, ...] = ()
    """CPU: which extents may be part of its code, for calls with many elements."""
    is_sized: bool = False
    """CPU: some are."""

    @property
    def shaping(self) -> frozenset[str]:
        """Numbers of a call that decide shapes, grids or whether it is allowed: another value may mean another launch, though the same code."""
        sizes = [size for _, size in self.computed] + [side for check in self.checks for side in (check.left, check.right)]
        return frozenset(parameter_of(name) for size in sizes for name in size.names if is_number(name))

    @property
    def in_place(self) -> tuple[ArrayParam, ...]:
        """Arrays of the caller that are written where they lie."""
        return tuple(p for p in self.inputs if isinstance(p, ArrayParam) and p.role == "inout")

    def __repr__(self) -> str:
        kernels = f"{len(self.launches)} kernel{'' if len(self.launches) == 1 else 's'}"
        return f"<artifact {self.name} for {self.target}: {kernels}, {len(self.code)} bytes of {self.kind}>"
