"""What things cost on a chip, as data: the numbers by which passes choose schedules.

In: a target's name and what is known of its device (multiprocessors, TB/s, TFLOP/s). Out: a `CostModel`. The numbers of `H200` were
fitted to measurements on that chip. `FITTED` names the targets that plan with a record of their own; all other chips get `derived`
numbers: rates go with what the device can do, times and shares stay.

Times are microseconds, rates are per microsecond, sizes bytes, where nothing else is said.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field, replace

from tilewright.base.record import record

Tile = tuple[int, int, bool, int]
"""m, n, whether warp groups take turns, and blocks of a cluster."""


@record
class LaunchCosts:
    """Kernels one after another."""

    second: float = 2.5
    """One more kernel, besides its traffic."""
    saved_early: float = 1.3
    """What a launch saves that is under way when the kernel before it ends. Its blocks then come to multiprocessors in no order:
    neighbours no longer ask for the same lines of the L2 cache together, and where some multiprocessors have less to do these are not
    spread evenly. Where operands are late rather than multiplied slowly, `scattered` of the time is lost."""
    scattered: float = 0.15
    smallest_part: int = 1 << 20
    """Products of one part below which a nest is not worth several kernels."""


@record
class WgmmaCosts:
    """Contractions by warp-group instructions."""

    rate: float = 5.7e6
    """Multiplications and additions of two-byte floats of one multiprocessor."""
    tile_rates: Mapping[Tile, float] = field(
        default_factory=lambda: {
            (128, 256, False, 1): 1.000, (128, 192, True, 1): 1.020, (128, 192, False, 1): 0.985, (128, 128, True, 1): 0.985,
            (192, 192, False, 1): 0.950, (192, 192, False, 2): 0.950, (64, 128, True, 1): 0.850, (128, 64, False, 1): 0.800,
            (128, 128, False, 1): 0.900, (192, 128, False, 1): 0.880,
        }
    )
    """The rate a tile reaches relative to the first when all multiprocessors are busy."""
    other_tiles: float = 0.8
    """The same for all other tiles."""
    feed: float = 115e3
    """Bytes that reach one multiprocessor from the L2 cache when rows are whole lines of it; ragged rows touch more lines."""
    feed_ragged: float = 46e3
    outside: int = 5
    outside_long: int = 2
    """How much longer than a row from the cache the copy engine takes for one that lies outside the array; the second where sums are so long that it waits for
    memory."""
    pixels: float = 0.13
    """What a step takes besides multiplying whose rows are the pixels of a convolution."""
    feed_pixels: tuple[float, float] = (70e3, 60e3)
    """Bytes that reach one multiprocessor as pixels whose channels are no whole lines of the cache, and bytes that lie outside of these."""
    streamed: tuple[float, float] = (9.0, 2.6)
    """What blocks take besides their steps that share all steps of all tiles: until flags are cleared and the last sums are there, and for each part of a tile."""
    rows: tuple[float, float] = (77e3, 44e3)
    """Bytes that reach one multiprocessor as rows of windows of few channels, and bytes that lie outside of these."""
    straddling: tuple[float, float] = (1.25, 2.0)
    """How much longer such rows take that begin at whole 32 bytes, and at whole 16, than at lines of the cache."""
    rows_in_turns: float = 1.12
    """The same where warp groups take turns."""
    stream: float = 3.9e6
    """Bytes from memory, over all."""
    arrive: float = 55e3
    """Bytes that reach one multiprocessor from memory."""
    packing: float = 2.2
    packing_windows: float = 3.0
    """Bytes moved for each byte that is packed first, about: of rows, and of places of windows."""
    turn: float = 2.8e6
    """Bytes that a copy from channels first to channels last reads and writes."""
    gather: float = 1.0e6
    """The same of a copy that puts the places of each window's row beside one another, which it tells apart by division."""
    parts: tuple[float, float, float] = (3.4e6, 2.4e6, 1.2e6)
    """Bytes that copies of images to parts of tf32 read and write: as they are, with places of a window beside channels, which are told apart by division, and with places that are neighbours
    in memory."""
    straddling_parts: float = 1.15
    """How much longer convolutions of parts take whose windows' rows do not begin at whole 32 bytes."""
    chunked: float = 0.9
    """The part of its rate that a tile reaches whose sums are taken from the matrix units in chunks."""
    parted: float = 1.35
    """How much of the rate instructions on tf32 reach in convolutions of parts, at most: with n columns, n / (n + 32) of it."""
    shallow: float = 1.17
    """How much longer operands of such take with two stages."""
    first: float = 1.0
    """Until the first operands of a tile of such are there, and the last results on their way, for each 128 rows."""
    finish: float = 7e-6
    finish_hidden: float = 2e-6
    """What an instruction after the sum takes, for each result of a multiprocessor: with nothing beside it, and while the other group
    multiplies. It is not free then: both use the same registers' ports."""
    read: float = 45e-6
    read_hidden: float = 36e-6
    """The same for each array as large as the results that is read."""
    scatter: float = 75e-6
    scatter_hidden: float = 36e-6
    """The same for results that leave registers one by one, eight side by side."""
    singles: float = 0.3e6
    """Elements of two bytes that phases of transposed convolutions store one by one."""
    turned: float = 30e-6
    turned_hidden: float = 10e-6
    """The same for those that are turned in shared memory first, and leave along rows of an image."""
    rs_step: float = 0.30
    rs_step_of_groups: float = 0.35
    """One step of a factor computed in registers besides a part of what its instructions do; the second with scales of its own."""
    rs_beside: float = 0.68
    """That part: the other warp group's instructions run meanwhile."""
    start: float = 2.0
    """Before the first and after the last tile."""
    exchange: float = 0.3
    """Until another block's sums are there, for each block that sends some."""
    box: float = 100e3
    """Bytes of such sums."""
    clusters: Mapping[int, float] = field(default_factory=lambda: {2: 1.0, 4: 0.9, 8: 0.75})
    """The part of the multiprocessors that clusters of so many blocks fill: each lies within one of the GPU's processing clusters."""


@record
class GemvCosts:
    """Products with few rows, whose time is that of reading the long factor."""

    stream: float = 4.3e6
    """Bytes from memory, over all."""
    arrive: float = 55e3
    """Bytes that reach one multiprocessor from memory."""
    latency: float = 0.9
    """From asking for bytes to having them, while memory is busy."""
    busy: float = 0.6
    """The part of its time that a warp has loads on their way."""
    registers: int = 24
    """Registers of a thread that hold no operands and no sums, about."""
    rate: float = 150e3
    """Instructions of the lanes of one multiprocessor."""
    widen: float = 1.0
    """Instructions that widen an element."""
    far: float = 7.0
    """How much longer reading x takes where lanes read far apart."""
    unpack: float = 3.0
    """Instructions that make a number of an element of a packed row."""
    ragged: float = 0.5
    """How much longer a step takes in which some lanes have nothing to read."""
    lane: int = 96
    """Bytes that a lane has best on their way at once."""
    uneven: float = 0.03
    """What a lane with twice or half as many loses, and a block with twice or half as many warps as four."""
    step: float = 0.12
    """What one of the first steps adds, before blocks overlap."""
    meeting: float = 0.3
    """What warps take to put together the sum of a row."""


@record
class WarpCosts:
    """Contractions by instructions of single warps, or plain multiply-adds. Rates are those of data sheets."""

    rate: float = 0.2e6
    """Multiply-adds of one multiprocessor where nothing is known of the chip."""
    feed: float = 3.0
    """How many times faster than memory the L2 cache is."""
    latency: float = 1.5
    """Microseconds from asking for bytes of memory to having them, while memory is busy and threads do other things."""
    streamed: float = 0.75
    """The part of memory's rate that operands are read at."""
    reached: float = 0.56
    reached_loose: float = 0.36
    """The part of a data sheet's rate that products of f32 in parts reach, with operands brought 16 bytes at a time and one by one."""
    images: tuple[float, ...] = (0.45, 0.32, 0.30, 0.22)
    images_fma: tuple[float, ...] = (1.0, 0.92, 0.9, 0.78)
    """The same for convolutions, whose places of results are two, three or four indices walked as one, by matrix instructions and by multiply-adds; first where operands
    are brought 16 bytes at a time."""
    strided_fma: tuple[float, ...] = (1.0, 0.73, 0.58)
    """What is left of the latter where neighbouring results read every element, every second, or every third or fewer: most of what memory brings is not used."""
    transposing: tuple[float, float, float] = (0.0, 0.05, 0.06)
    """The part of its time that turning the elements of so many factors costs a multiprocessor."""
    taken_apart: float = 3e-5
    brought: float = 7.7e-5
    """What it takes to make two parts of tf32 of an f32 for matrix instructions, and to bring one by itself to shared memory, for each element and multiprocessor."""
    f64_rates: Mapping[tuple[int, int], tuple[float, float]] = field(
        default_factory=lambda: {
            (128, 128): (0.89, 0.93), (96, 128): (0.82, 0.90), (128, 96): (0.80, 0.90), (96, 192): (0.79, 0.85), (192, 96): (0.77, 0.85),
            (64, 96): (0.79, 0.86), (96, 64): (0.77, 0.86), (96, 96): (0.75, 0.91), (64, 128): (0.77, 0.87), (128, 64): (0.74, 0.89), (64, 64): (0.71, 0.82),
        }
    )  # fmt: skip
    """The part of a data sheet's rate that tiles of f64 reach by matrix instructions: where a factor runs across the sum, and where both run along it."""
    words: float = 30e3
    vectors: float = 56e3
    """Bytes that sixteen warps of a multiprocessor bring in copies of four or eight bytes each, about, and of sixteen."""
    busy_warps: int = 8
    """Warps that keep a multiprocessor busy: two for each of its four schedulers."""
    packing: float = 0.75
    """The part of the memory's rate at which a kernel packs."""
    packed_rows: int = 32
    """Rows of x up to which packed weights are unpacked on their way to matrix instructions, and not to scratch before."""


@record
class AttentionCosts:
    """Attention."""

    cached: int = 32 << 20
    """Bytes of keys and values that are walked together, so that they stay in the L2 cache."""
    together: int = 64
    """Batch points that are walked together, at most: of 128 with few keys the first are forgotten before the last tiles."""
    short: int = 1024
    """Up to this many keys a tile is over soon, and queries that leave shared memory at once make room for the next."""
    counted_from: float = 2e10
    """Operations up to which a second launch, which sets a counter, costs more than it brings."""
    early_to: float = 2e11
    """Operations up to which it is worth beginning before the kernel launched before has ended."""
    group_rates: Mapping[int, float] = field(default_factory=lambda: {1: 0.5, 2: 0.885, 3: 1.0, 4: 0.9})
    """By the number of warp groups: how fast steps are, beside those of three. Fitted from 512 to 4096 rows of 64 columns."""
    group_ends: Mapping[int, int] = field(default_factory=lambda: {1: 100, 2: 105, 3: 260, 4: 110})
    """Beginning and end of a tile, while which little is multiplied, as so many keys."""
    parts_rate: float = 42e6
    terms_rate: float = 105e6
    """Multiplications and additions of f32, over all: in parts of tf32 by single warps, and in terms of bf16 by warp groups."""
    block_rates: Mapping[int, tuple[float, int]] = field(default_factory=lambda: {1: (0.45, 100), 2: (0.7, 20), 3: (0.75, 5)})
    """Both of blocks of one group, by how many a multiprocessor has at once."""


@record
class ReductionCosts:
    """Where long reductions are cut."""

    shortest: int = 16384
    """Elements of a stretch that is worth a block of its own, along memory; and rows of one across it."""
    fewest_rows: int = 64
    blocks: int = 4
    """Blocks wanted on each multiprocessor along memory; twice as many where elements are narrow."""
    blocks_across: int = 8
    """The same across it."""
    enough_across: int = 4
    """Blocks on each multiprocessor from which on sums across rows are not cut."""
    short_row: int = 1024
    """Elements of a row up to which a block adds up several of them, one after another."""
    stretch: int = 4096
    """Elements of all these rows."""
    blocks_of_rows: int = 32
    """Such blocks wanted on each multiprocessor."""
    cpu_stretch: int = 32768
    """Elements one unit of CPU work reduces."""
    cpu_rows: int = 64
    """Rows one unit of CPU work adds up."""
    cpu_results: int = 64
    """Results that keep all cores busy without cutting reductions."""


@record
class ScanCosts:
    """Where loops that are scans are cut."""

    stretch: int = 8192
    """Turns of a part that is worth a block of a GPU, where the threads of a block walk it together."""
    blocks: int = 8
    """Blocks wanted on each multiprocessor there."""
    shortest: int = 256
    """Turns of a part that is worth a thread."""
    threads: int = 64
    """Threads wanted on each multiprocessor: one thread learns for all of them, one after the other, what is before each."""
    threads_across: int = 512
    """The same where neighbouring threads have neighbouring lines."""
    rows: int = 64
    """Turns of a part there."""
    cpu_stretch: int = 4096
    """Turns of a part that is worth a block of a CPU."""
    cpu_parts: int = 64
    """Parts that keep all cores busy."""
    cpu_columns: int = 2048
    """Lines side by side that do."""


@record
class RowCosts:
    """Rows that are walked several times and stay in registers."""

    values: int = 64
    """Elements of a row one thread may hold, if it holds no others beside them; of several arrays half as many each."""
    most: int = 80
    """The same for a row of one array that one block then holds: rather a few more than a larger block."""
    share: int = 16
    """Elements of four bytes of a row one thread holds where rows are of ordinary length, twice as many narrower ones: enough loads in
    flight, and enough blocks."""
    threads: int = 256
    """Threads of a block, if they can hold the row; twice as many wait longer for one another."""
    cluster: int = 8
    """Blocks that share a row no block can hold."""
    block: int = 128
    """Threads of a block whose rows are short: it has as many rows as they hold."""
    vector: int = 8
    """Where rows begin anywhere and vectors would have fewer bytes than this, they are shifted."""
    cut: int = 8192
    """Elements of a row of several axes that is rather cut than read element by element."""
    streamed: int = 1024
    streamed_light: int = 16384
    """Elements from which on rows that are walked once, and begin anywhere, are read in vectors: with much to compute for each, and with little. Shorter ones have too few between
    their ends."""
    long: int = 8192
    """Elements from which on `block` threads walk such a row, and not half as many."""
    together: int = 2
    """Vectors of such a long row that a thread has on their way."""
    loads: int = 16
    """Single elements that a thread has on their way where a block adds up several short rows; half as many vectors."""
    resident: int = 3
    """Blocks that find room at once where rows of a cluster begin anywhere and vectors are of many elements, or the ends of rows take too
    many registers. Where long rows are scaled by another array, two do: the assembler would spill a few registers for a third."""


@record
class MapCosts:
    """Results that are computed by themselves, and short sums of overlapping windows."""

    vectors: int = 2
    """Vectors of a thread in flight: best or within noise of it for one to three streams."""
    shifted_vectors: int = 8
    """Vectors of a row that begins anywhere, from which on it is written in vectors nevertheless."""
    shifted_row: int = 1024
    shifted_threads: int = 256
    """Elements of such a row from which on a block has a part of one, and threads of a block that has several."""
    few_terms: int = 32
    """So short a reduction, where results lie side by side too, is not spread over threads."""
    across: int = 8
    """Lanes of a warp along the index that what is read lies along, where results lie along another."""
    turned_side: int = 64
    turned_threads: int = 256
    """Side of a square that a block reads along memory, where results lie along the other axis, and threads of such a block."""
    turned_below: int = 8
    """Bytes of elements below which that is faster than vectors of results, too."""
    window_threads: int = 128
    window_results: int = 32
    """Results of a thread: a vector, and as many as it takes along the index it walks itself, but no more than `window_along` there."""
    window_along: int = 8
    window_few_terms: int = 25
    """Where a result has more terms, its thread has as many results, and writes out as many terms, as take the least instructions."""
    window_widest: int = 4
    """Elements of a vector: more take too many registers."""
    window_lanes: int = 16
    """Threads along memory where neighbours across it share more."""
    placing_threads: int = 128
    placed: int = 32
    """Results of a thread that takes each of them from somewhere else (`passes/windows/placing.py`)."""
    placed_columns: int = 4
    """Columns of a thread, or vectors of them, at most: it computes where each of them lies, and keeps that for all of its rows."""
    turning_threads: int = 256
    turned_bytes: int = 128
    """Of a line of channels that a block turns to rows."""
    border: int = 80
    """Bytes of a row that could be written while two blocks write parts of one sector."""
    idle: float = 0.3
    """What a thread without results costs, of one that has some."""
    window_written: int = 2048
    """Instructions of a thread that are written out at most, in windows of more than a few terms."""
    window_fetched: float = 1e-4
    """By how much more each takes longer for every instruction that is: long code does not stay in the instruction cache."""
    window_registers: int = 110
    """Numbers that a thread holds at a time there."""
    window_element: float = 4.0
    """Instructions for an element that is loaded: where it lies, whether it lies inside, the load."""
    window_weight: float = 1.5
    """Instructions for a weight that all results of a thread share."""
    window_apart: int = 4
    """Results of a thread that share what they read, where it is decided whether windows are reduced axis by axis."""
    window_stored: float = 10.0
    """Instructions, or what takes as long, for a result of the first axis that is stored and read again."""
    window_spread: int = 4
    """Results of a thread where windows slide along memory only, as rows of a window do that are reduced first."""
    window_segment: float = 4.0
    """Threads side by side along memory for which loads of short stretches take twice as long."""
    window_turn: int = 10
    """Instructions for a turn of a loop over terms that are not written out."""
    window_busy: int = 512
    """Threads for each multiprocessor, below which a thread has fewer results."""


@record
class RangeCosts:
    """Rows whose length data decide, as those of a sparse matrix."""

    threads: int = 128
    terms: int = 4
    gathered_terms: int = 2
    """Terms of a row that a thread has in flight; the second where terms are read at places that data decide, which take longer than rows themselves."""
    fewest_lanes: int = 2
    """Threads that share a row, at least."""
    length: int = 32
    """How long a row is where nothing is known of it."""
    longest: int = 2048
    """Rows that are longer on average take a block each."""
    dense_threads: int = 256
    dense_resident: int = 4
    """Threads of a block, and blocks that are to find room on a multiprocessor at once, where what is read lies along an index of the results: rows of a
    matrix."""
    repaired: int = 8
    """Results of a thread that looks for those that are no number."""


@record
class CacheCosts:
    """Work on a CPU: what stays in its caches, and what is worth a unit of work."""

    depth: int = 512
    window_depth: int = 640
    lying_depth: int = 5120
    """How much of the sum is done at most before its results go back to memory, for elements of 4 bytes: in one matrix product, in all else, and where rows of
    the first factor are read without a copy. 64 channels under a window of 3 x 3 are 576."""
    panel_bytes: int = 22 << 10
    """How much of the other factor lies in the first-level cache, beside what passes of the one that is kept: a panel of rows over one stretch of the sum."""
    kept_bytes: int = 1 << 20
    """How much of one factor lies in the second-level cache at once."""
    unit_depth: int = 1 << 11
    """Bytes along the sum of a panel for the matrix unit: reading panels from the second-level cache costs less than adding to sums in
    the third."""
    sum_bytes: int = 9 << 19
    """How much of the result is kept between two stretches of the sum."""
    chunk: int = 65536
    """Elements of one unit of work for the thread pool."""
    rows_per_block: int = 16
    """Rows of one unit of work where each is short and a sum over a window."""
    columns: int = 4096
    """Results of one unit of work where each is a reduction across rows."""
    square: int = 512
    """Bytes of a side of the squares in which memory is read across its rows."""
    results_ahead: int = 1024
    """Bytes between what a loop writes and the lines of results that it asks for."""
    short_row: int = 15
    """How long rows are at most, for vectors to lie across them."""
    paired: int = 512
    """Results of one unit of work along rows, where each is a sum over two rows."""
    attention_step: int = 48
    """Keys of a step: the weights of a strip, and the values, stay in the nearest cache."""
    attention_strips: int = 2
    """Strips of a block, which share copies of keys and values."""


@record
class CostModel:
    """All of a chip."""

    chip: str
    """The one the numbers were fitted to."""
    launch: LaunchCosts = LaunchCosts()
    wgmma: WgmmaCosts = WgmmaCosts()
    gemv: GemvCosts = GemvCosts()
    warps: WarpCosts = WarpCosts()
    attention: AttentionCosts = AttentionCosts()
    reductions: ReductionCosts = ReductionCosts()
    scans: ScanCosts = ScanCosts()
    rows: RowCosts = RowCosts()
    maps: MapCosts = MapCosts()
    ranges: RangeCosts = RangeCosts()
    caches: CacheCosts = CacheCosts()


H200 = CostModel("H200 SXM")
"""The defaults of all records above."""
H200_MULTIPROCESSORS, H200_BANDWIDTH, H200_HALF, H200_F32 = 132, 4.8, 989.0, 67.0
"""Its multiprocessors, TB/s of memory, TFLOP/s of two-byte floats on tensor cores, and of f32."""

FITTED: dict[str, CostModel] = dict.fromkeys(("sm_75", "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_100a", "sm_103", "sm_120"), H200)  # fmt: skip
"""Targets that plan with fitted numbers. Only an H200 was measured; the others plan as it does until somebody measures them."""


def with_numbers(costs: CostModel, numbers: Iterable[tuple[str, int]]) -> CostModel:
    """The same with other numbers, by names such as `rows.threads`; names without a dot are no numbers of it."""
    for name, number in numbers:
        part, _, field_name = name.rpartition(".")
        if part:
            costs = replace(costs, **{part: replace(getattr(costs, part), **{field_name: number})})
    return costs


def derived(multiprocessors: int, bandwidth: float, half: float, f32: float) -> CostModel:
    """Numbers for a chip nobody measured, from those of the H200: `bandwidth` in TB/s, `half` and `f32` in TFLOP/s, 0 where unknown.
    Rates of one multiprocessor go with its share of what the device can do."""
    share = H200_MULTIPROCESSORS / multiprocessors
    memory = bandwidth / H200_BANDWIDTH if bandwidth else 1.0 / share
    matrix = half / H200_HALF if half else 1.0 / share
    plain = f32 / H200_F32 * share if f32 else 1.0
    known = H200.wgmma
    wgmma = replace(
        known, rate=known.rate * matrix * share, feed=known.feed * memory * share, feed_ragged=known.feed_ragged * memory * share, feed_pixels=(known.feed_pixels[0] * memory * share, known.feed_pixels[1] * memory * share),
        stream=known.stream * memory, arrive=known.arrive * memory * share, turn=known.turn * memory, gather=known.gather * memory, parts=(known.parts[0] * memory, known.parts[1] * memory, known.parts[2] * memory), rows=(known.rows[0] * memory * share, known.rows[1] * memory * share), box=known.box * memory * share,
        finish=known.finish / plain, finish_hidden=known.finish_hidden / plain, read=known.read / (memory * share),
        read_hidden=known.read_hidden / (memory * share), scatter=known.scatter / (memory * share),
        scatter_hidden=known.scatter_hidden / (memory * share), turned=known.turned / (memory * share), turned_hidden=known.turned_hidden / (memory * share),
    )  # fmt: skip
    # The work that a launch is worth grows with what a device does meanwhile.
    attention = replace(
        H200.attention, counted_from=H200.attention.counted_from * matrix, early_to=H200.attention.early_to * matrix
    )
    gemv = replace(H200.gemv, stream=H200.gemv.stream * memory, arrive=H200.gemv.arrive * memory * share, rate=H200.gemv.rate * plain)
    return replace(H200, chip="", wgmma=wgmma, attention=attention, gemv=gemv)
