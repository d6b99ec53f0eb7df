"""Schedules of contractions: the tile of one block, who computes it with which instructions, and how operands are brought in.

A `MatrixSchedule` is data: it prints as `family=wgmma m=128 n=256 …`, parses back, and is what the tuner stores. How one is chosen
is in `choose_matrix.py`.
"""

from __future__ import annotations

from dataclasses import fields

from tilewright.base.errors import UserError
from tilewright.base.record import record

ATTENTION = ("attention", "attention_mma")
"""Families of chains of two products."""


@record
class MatrixSchedule:
    """One way to compute a contraction."""

    family: str
    """`wgmma` (Hopper's warp-group instructions), `mma` (warp instructions), `fma` (ordinary arithmetic on a GPU), `amx` (a CPU's
    matrix unit), `cpu`; `attention` and `attention_mma` (a chain of two products with Hopper's instructions, or with warp
    instructions), `cpu_attention`."""
    m: int
    n: int
    k: int
    """Results of one block along m and n, and how much of the sum one step takes."""
    stages: int = 1
    """Steps whose operands are in shared memory at once."""
    groups: int = 1
    """Warp groups that compute (wgmma), side by side along m or taking turns."""
    warps_m: int = 1
    warps_n: int = 1
    """How warps share the tile (mma, fma, attention_mma)."""
    turns: bool = False
    """The warp groups take whole tiles in turns, so that one computes while the other stores."""
    wait: int = 0
    """Groups of matrix instructions left running while the next step is started."""
    cluster: int = 1
    """Blocks that share operands by multicast, neighbours along `cluster_along`."""
    raster: int = 8
    """Tiles along m that are walked before the next one along n."""
    persistent: bool = True
    """As many blocks as multiprocessors, each computing many tiles."""
    buffers: int = 2
    """Pieces of the result on their way out of a warp group's shared memory."""
    inner: int = -1
    """Which of several summed indices is cut into steps, the others being walked around it; -1: all are walked as one."""
    apart: bool = False
    """Of several indices on a side only the innermost makes up tiles; the others are walked one by one."""
    swap: bool = False
    """Exchange the factors: the tile's rows are the results' columns."""
    parts: int = 1
    """Parts the sum is cut into, computed by different blocks and added up by a second kernel."""
    sum_cluster: int = 1
    """Blocks of a cluster that share the sum of each tile, a stretch each; one of them adds up what the others send it."""
    stream: bool = False
    """Every block takes an equal stretch of all steps of all tiles; where a tile falls to several, one of them adds up what the
    others leave in memory for it."""
    chunk: int = 0
    """Terms of the sum that are added up from zero before they are added to the rest (mma, fma); 0: all."""
    chunks: int = 1
    """Such sums that are added up from zero in turn."""
    products: int = 3
    """Of the two parts of each factor (precision `3xtf32`): 4 has that of the small parts too."""
    a_copy: str = "tma"
    b_copy: str = "tma"
    """How operands are brought: by the copy engine (`tma`; `image`: as the pixels of a convolution), packed first (`pack`), computed in
    registers from what the copy engine brings (`registers`, the first one), or by threads (`async`, `threads`)."""
    store: str = "tma"
    """How results leave: through shared memory by the copy engine (`tma`), or from registers (`direct`)."""
    turn: str = ""
    """What is copied so that channels lie last: a convolution's input before it (`image`), its results after it (`result`), or `both`."""
    mr: int = 0
    nr: int = 0
    """CPU: rows and columns of results held in registers at once."""
    vectors: int = 1
    """CPU: SIMD registers along `nr`."""
    beside: int = 1
    """Products of the same first factor that one block computes side by side, `n` results of each; `join_products` makes them one kernel."""
    keep: str = "b"
    """CPU: the factor of which a block holds a copy of all it needs for a stretch of the sum; the other is copied panel by panel."""
    early: bool = False
    """Start before the kernel launched before has ended."""
    dynamic: bool = False
    """Blocks fetch the number of their next tile from a counter, so that tiles may take different times."""
    wide: int = 0
    """Attention: columns of the values; `m` are rows, `n` the keys of one step, `k` the terms of a score (on a CPU, what there is room for of
    either)."""

    blocks: int = 1
    """Attention with Hopper's instructions: blocks that a multiprocessor has at once."""

    def describe(self) -> str:
        """All that differs from the defaults, as `name=value` words."""
        words = []
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("family", "m", "n", "k") or value != field.default:
                words.append(f"{field.name}={int(value) if isinstance(value, bool) else value}")
        return " ".join(words)

    @property
    def columns(self) -> int:
        """Columns of the second factors that one step brings."""
        return self.n * self.beside

    @property
    def threads(self) -> int:
        """Threads of one block."""
        if self.family in ("wgmma", "attention"):
            return 128 * (self.groups + 1)
        return 32 * self.warps_m * self.warps_n if self.family in ("mma", "fma", "attention_mma") else 1


def parse_schedule(text: str) -> MatrixSchedule:
    """The schedule `describe` printed."""
    kinds = {field.name: field for field in fields(MatrixSchedule)}
    values: dict[str, object] = {}
    for word in text.split():
        name, equals, value = word.partition("=")
        field = kinds.get(name)
        if field is None or not equals:
            raise UserError.at("TW005", f"'{word}' is not part of a schedule", help=f"names are {', '.join(kinds)}")
        if field.type == "str":
            values[name] = value
        elif not value.lstrip("-").isdigit():
            raise UserError.at("TW005", f"'{word}': {name} is an integer")
        else:
            values[name] = bool(int(value)) if field.type == "bool" else int(value)
    missing = [name for name in ("family", "m", "n", "k") if name not in values]
    if missing:
        raise UserError.at("TW005", f"a schedule needs {', '.join(missing)}")
    return MatrixSchedule(**values)  # type: ignore[arg-type]
