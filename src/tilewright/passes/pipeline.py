"""The table of contents of the compiler: every pass, and every order in which passes run.

A `Pass` says what it takes, what it returns and what it does. A `Step` puts it into an order and says why it stands there. `ORDERS` holds all
orders. `TO_TILE` and `TO_THREAD` say which lowering a schedule and a target choose. `routes.py` takes programs through the orders, and `runner.py`
runs each. The tables in ARCHITECTURE.md are written from here (`tools/pass_table.py`).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from tilewright.base.record import record
from tilewright.base.target import Target
from tilewright.ir.nodes import walk
from tilewright.ir.ops import OPS
from tilewright.ir.specialise import with_sizes
from tilewright.passes.runner import (
    ANY,
    LateFunction,
    Pass,
    Selection,
    Step,
    When,
    late,
)
from tilewright.passes.schedules.gemv import Gemv
from tilewright.passes.schedules.loops import Schedule
from tilewright.passes.schedules.matrix import GpuProduct
from tilewright.passes.schedules.plans import Plan

# -- the passes -------------------------------------------------------------------------------------------------------

TARGET = ("target",)
PLANNED = ("plans",)
SCHEDULED = ("schedule", "target")
_RANDOM = sorted(name for name in OPS if name.startswith("random_"))
_FUNCTIONS = sorted(name for name, row in OPS.items() if row.group == "function" and name not in _RANDOM and not name.endswith("_approx"))
_FUNCTIONS += ["copysign", "floordiv", "fmod", "frexp_exponent", "frexp_fraction", "mod", "nextafter", "scale_by_power"]

LOWER_TREE = Pass(
    "lower_tree", "tree", "program", late("from_tree.lower_tree", "lower_kernel"),
    "One kernel for each top-level nest; accumulations become `reduce`.",
)  # fmt: skip
LINK_BLOCKS = Pass(
    "link_blocks", "blocks", "program", late("from_tree.link_blocks", "link_parts"),
    "The programs of several blocks become one; views between blocks become indices.", takes=("programs",),
)  # fmt: skip
GUARD_CHECKS = Pass(
    "guard_checks", "program", "program", late("program.guard_checks", "guard_checks"),
    "Loads under a condition that speaks of other indices get a check that their loops fit their arrays.",
)  # fmt: skip
WHOLE_WINDOWS = Pass(
    "whole_windows", "loop", "loop", late("windows.whole_windows", "whole_windows"),
    "Loops over the part of a window that is inside an array become loops over the whole window, under conditions.", needs="reduce",
)  # fmt: skip
UNPACK_BLOCKS = Pass(
    "unpack_blocks", "program", "program", late("packed.unpack_blocks", "unpack_blocks"),
    "Arrays of packed blocks become arrays of bytes; an element becomes arithmetic on those of its block.", takes=("metadata",),
)  # fmt: skip
EXPAND_DOTS = Pass(
    "expand_dots", "thread", "thread", late("packed.expand_dots", "expand_dots"),
    "CPU: rows of packed weights times rounded activations become dot products of bytes.", takes=TARGET, needs="packed_dots",
)  # fmt: skip
DOT_PRODUCTS = Pass(
    "dot_products", "thread", "thread", late("packed.dot_products", "dot_products"),
    "Arm CPU: sums of products of bytes become dot products, whose lanes are added up as late as can be.", takes=TARGET, needs="fold",
)  # fmt: skip
SPLIT_BLOCKS = Pass(
    "split_blocks", "loop", "loop", late("packed.split_blocks", "split_blocks"),
    "CPU: loops over rows of packed blocks become loops over blocks and places in them.", needs="mod",
)  # fmt: skip
SIMPLIFY = Pass(
    "simplify", ANY, ANY, late("common.simplify", "simplify"),
    "Folds constants, shares equal ops, drops comparisons that ranges prove.",
)  # fmt: skip
UNTILE = Pass(
    "untile", "loop", "loop", late("loop.untile", "untile"),
    "Undoes the tiles of the source: the index of a tile and the index inside it become one.",
)  # fmt: skip
DROP_OVERWRITTEN = Pass(
    "drop_overwritten", "loop", "loop", late("loop.drop_overwritten", "drop_overwritten"),
    "Stores that another store overwrites before anything reads them are dropped.", needs="store",
)  # fmt: skip
SHARE_LOADS = Pass(
    "share_loads", "loop", "loop", late("loop.share_loads", "share_loads"),
    "Elements that a point has read before are not read again, in nests with conditions.", needs="if",
)  # fmt: skip
HOIST = Pass(
    "hoist", "loop", "loop", late("loop.hoist", "hoist"),
    "Moves reductions out of loops that do not change them; equal ones become one.", needs="reduce",
)  # fmt: skip
RECOVER_REDUCTIONS = Pass(
    "recover_reductions", "loop", "loop", late("loop.recover_reductions", "recover_reductions"),
    "A loop that carries running maxima, and sums scaled by them, becomes the reductions that it computes.", needs="for",
)  # fmt: skip
PROMOTE_LOOPS = Pass(
    "promote_loops", "loop", "loop", late("loop.promote_loops", "promote_loops"),
    "CPU: independent loops right inside a parallel loop, around a product, become axes of it.", takes=TARGET, needs="for reduce",
)  # fmt: skip
CUT_GROUPS = Pass(
    "cut_groups", "program", "program", late("loop.cut_groups", "cut_groups"),
    "CPU: an index of a product's results that is divided, as in grouped convolutions, becomes two: groups, and results of a group.", takes=TARGET, needs="floordiv mod",
)  # fmt: skip
GATHER_SUMS = Pass(
    "gather_sums", "program", "program", late("loop.gather_sums", "gather_sums"),
    "Products that are added to places which several indices make, as in scattered transposed convolutions, become sums of what each place has.", needs="mul fma",
)  # fmt: skip
FOLD_FILLS = Pass(
    "fold_fills", "program", "program", late("loop.fold_fills", "fold_fills"),
    "Arrays that are filled with a number, and then written whole by a kernel, are not filled: the kernel writes the number where it writes nothing else.", needs="calls",
)  # fmt: skip
FUSE = Pass(
    "fuse", "program", "program", late("program.fuse", "fuse"),
    "Kernels that hand on an array become one: as an epilogue, as a prologue, or row by row. What stays apart gets a reason (`inspect --fusion`).",
    gives="fusion",
)  # fmt: skip
SPECIALISE = Pass(
    "specialise", "program", "program", with_sizes,
    "Small sizes become constants: those of a convolution's window, or of one row of attention.", takes=("sizes",),
)  # fmt: skip
JOIN_GUARDS = Pass(
    "join_guards", "loop", "loop", late("windows.join_guards", "join_guards"),
    "Sums of sums under conditions become one sum under one condition, whose tests are bounds of the indices of loads.", needs="reduce",
)  # fmt: skip
COPY_BORDERS = Pass(
    "copy_borders", "program", "program", late("windows.copy_borders", "copy_borders"),
    "Windows whose places wrap around, or stop at the border (`%`, `min`, `max`), read a copy with a border of such elements; on GPUs where they are products.", takes=TARGET, needs="reduce",
)  # fmt: skip
NARROW_ARRAYS = Pass(
    "narrow_arrays", "program", "program", late("windows.narrow_arrays", "narrow_arrays"),
    "CPU: axes that loops under conditions walk in part, as windows of literal size do, count as long as these loops.", takes=TARGET, needs="reduce",
)  # fmt: skip
SINGLE_PLACES = Pass(
    "single_places", "loop", "loop", late("windows.single_places", "single_places"),
    "GPU: sums over windows of a single place become plain sums over channels.", gpu=True, needs="reduce",
)  # fmt: skip
SQUARE_TRIANGLES = Pass(
    "square_triangles", "program", "program", late("triangles.square_triangles", "square_triangles"),
    "Products of which a triangle counts become contractions that skip tiles outside of it; results that are no number are added up again, term by term.", needs="reduce",
)  # fmt: skip
SQUARE_RESULTS = Pass(
    "square_results", "program", "program", late("triangles.square_results", "square_results"),
    "Products of which some results are wanted, a triangle or what a condition stores, are computed whole to scratch; the rest of the kernel takes what counts.", needs="reduce",
)  # fmt: skip
MULTIPLY_TAPS = Pass(
    "multiply_taps", "program", "program", late("windows.multiply_taps", "multiply_taps"),
    "CPU: sums whose terms count only where `p % s == 0` become one product for all taps, and a sum of its results, where that takes less time than phases.", takes=("target", "sizes"), needs="reduce",
)  # fmt: skip
PLACE_TAPS = Pass(
    "place_taps", "program", "program", late("windows.place_taps", "place_taps"),
    "GPU: the same sums, where no result has terms of two taps or phases would be many or short, become one product for all taps, and a kernel that puts its results in their places.", takes=("target", "sizes", "given"), needs="reduce",
)  # fmt: skip
SPLIT_PHASES = Pass(
    "split_phases", "program", "program", late("windows.split_phases", "split_phases"),
    "Sums whose terms count only where `p % s == 0` become one kernel for each rest of the results' index, with the terms that count and `p // s` affine. Sums over sizes that are to become numbers wait for these.", takes=("later", "target"), needs="reduce",
)  # fmt: skip
EMPTY_ROWS = Pass(
    "empty_rows", "loop", "loop", late("loop.empty_rows", "empty_rows"),
    "Rows of a softmax-weighted sum that a mask leaves without terms are zero.", needs="reduce",
)  # fmt: skip
SPLIT_AXES = Pass(
    "split_axes", "loop", "loop", late("loop.split_axes", "split_axes"),
    "An axis that loops walk in blocks becomes two, such as the heads that lie side by side in a row.",
)  # fmt: skip
DROP_SINGLE = Pass(
    "drop_single", "loop", "loop", late("loop.drop_single", "drop_single"),
    "CPU: a nest of two loops of which one has a single turn becomes one loop: a product with one row is a matrix times a vector.",
)  # fmt: skip
COLLAPSE = Pass(
    "collapse", "loop", "loop", late("loop.collapse", "collapse"),
    "Neighbouring loops that walk memory as one loop would become one loop.",
)  # fmt: skip
SHIFTED_VARIANCE = Pass(
    "shifted_variance", "loop", "loop", late("loop.shifted_variance", "shifted_variance"),
    "A variance written as a difference of two means is computed about the mean.", needs="reduce",
)  # fmt: skip
STABILISE = Pass(
    "stabilise", "loop", "loop", late("loop.stabilise", "stabilise"),
    "Picks forms that lose fewer bits: `1 + tanh(u)` as a sigmoid, `k(x + cx³)` as `x(k + kcx²)`.", needs="tanh",
)  # fmt: skip
FUSE_MULTIPLY_ADD = Pass(
    "fuse_multiply_add", ANY, ANY, late("loop.fuse_multiply_add", "fuse_multiply_add"),
    "A product and the sum that uses it become `fma`.",
)  # fmt: skip
MARK_LOW_PRECISION = Pass(
    "mark_low_precision", "loop", "loop", late("loop.mark_low_precision", "mark_low_precision"),
    "Marks functions of whose results only few bits count.", needs="exp exp2 sigmoid div",
)  # fmt: skip
DROP_EMPTY = Pass(
    "drop_empty", "program", "program", late("program.drop_empty", "drop_empty"), "Kernels that write nothing, since no condition of theirs can hold, are dropped.",
)  # fmt: skip
STAGE_ATTENTION = Pass(
    "stage_attention", "program", "program", late("portable.stage_attention", "stage_attention"),
    "GPUs: attention that no kernel of its own computes becomes three, scores, weights and weighted values, with scratch arrays between them.", takes=("target", "sizes"), gpu=True, needs="reduce",
)  # fmt: skip
FISSION_PRODUCTS = Pass(
    "fission_products", "program", "program", late("program.fission_products", "fission_products"),
    "A nest with several products of different rows (`x @ w + h @ u`) becomes one kernel for each; they hand on their sums.", needs="reduce",
)  # fmt: skip
FISSION_SCATTERS = Pass(
    "fission_scatters", "program", "program", late("scatters.fission_scatters", "fission_scatters"),
    "CPU: a nest whose points run through loops before they scatter becomes two: one that stores what the loops result in, and one that scatters.", takes=TARGET, cpu=True, needs="accumulate",
)  # fmt: skip
PLAN = Pass(
    "plan", "program", "plans", late("choose.plan", "plan_contractions"),
    "Picks schedules of contractions, attention and rows for the sizes of the call (`passes/choose/plan.py`); rewrites nothing.",
    takes=("target", "sizes", "given", "metadata"), gives="plans", needs="reduce for",
)  # fmt: skip
FUSE_HORIZONTALLY = Pass(
    "fuse_horizontally", "program", "program", late("program.fuse_horizontally", "fuse_horizontally"),
    "Products of the same rows (gate and up; queries, keys and values) become one kernel where their plans say `beside`.",
    takes=PLANNED, gives="plans", needs="reduce",
)  # fmt: skip
ROW_PROLOGUES = Pass(
    "row_prologues", "program", "program", late("program.row_prologues", "row_prologues"),
    "Norms of rows that only products with few rows read are computed in these, by every block again.",
    takes=PLANNED, gives="plans", needs="plans",
)  # fmt: skip
ROW_MAPS = Pass(
    "row_maps", "program", "program", late("program.row_maps", "row_maps"),
    "GPU: norms of few rows that only maps read (rotary positions) are computed by these, a row at a time.",
    takes=("plans", "target", "hints"), gives="plans", needs="reduce",
)  # fmt: skip
CLIP_WINDOWS = Pass(
    "clip_windows", "loop", "loop", late("loop.clip_windows", "clip_windows"),
    "CPU: sums over a window end where what they read ends, if that is the same for a whole vector.", takes=TARGET, needs="reduce",
)  # fmt: skip
PAD_WINDOWS = Pass(
    "pad_windows", "program", "program", late("program.pad_windows", "pad_windows"),
    "CPU: inputs read through a window get a frame of zeros, so that no guard is left.",
    takes=("plans", "target"), gives="plans", needs="reduce",
)  # fmt: skip
TO_CHANNELS_LAST = Pass(
    "to_channels_last", "program", "program", late("program.to_channels_last", "to_channels_last"),
    "Images with channels first are copied to channels last, which the copy engine reads as pixels; results are copied back.",
    takes=PLANNED, gives="plans", needs="plans",
)  # fmt: skip
WINDOW_ROWS = Pass(
    "window_rows", "program", "program", late("windows.window_rows", "window_rows"),
    "Convolutions of few channels whose schedule says so read copies of images in which a row of a window is neighbours in memory, and count all of it as channels.",
    takes=PLANNED, gives="plans", needs="plans",
)  # fmt: skip
GATHER_PHASES = Pass(
    "gather_phases", "program", "program", late("windows.gather_phases", "gather_phases"),
    "Phases of a transposed convolution whose schedules say so write their results side by side to scratch; one kernel puts all of them in their places.",
    takes=PLANNED, gives="plans", needs="plans",
)  # fmt: skip
JOIN_PHASES = Pass(
    "join_phases", "program", "program", late("windows.join_phases", "join_phases"),
    "CPU: phases of a sum that are the same but for numbers become calls of one kernel, whose numbers are sizes.", takes=("plans", "target"), gives="phases", needs="plans",
)  # fmt: skip
PART_PHASES = Pass(
    "part_phases", "program", "program", late("windows.join_phases", "part_phases"),
    "CPU: phases that were joined are kernels again, each with its numbers.", takes=("phases",), needs="phases",
)  # fmt: skip
SPLIT_IMAGES = Pass(
    "split_images", "program", "program", late("windows.split_images", "split_images"),
    "Convolutions of f32 whose schedule says so read copies of their factors as parts of tf32, images with channels last, and sum up products of parts.",
    takes=PLANNED, gives="plans", needs="plans",
)  # fmt: skip
REPACK = Pass(
    "repack", "program", "program", late("program.repack", "repack"),
    "Operands that the copy engine cannot read are packed into ones that it can.", takes=PLANNED, gives="plans", needs="plans",
)  # fmt: skip
WIDEN_OPERANDS = Pass(
    "widen_operands", "program", "program", late("program.widen_operands", "widen_operands"),
    "8-bit operands of attention are copied to 16-bit ones.", takes=PLANNED, gives="plans", needs="plans",
)  # fmt: skip
SPLIT_ATTENTION = Pass(
    "split_attention", "program", "program", late("program.split_attention", "split_attention"),
    "Attention of few queries over many keys becomes two kernels where its schedule says so: parts of the keys, and the sum of the parts.",
    takes=("plans", "target", "hints"), gives="plans", needs="reduce",
)  # fmt: skip
FLATTEN_ROWS = Pass(
    "flatten_rows", "loop", "loop", late("rows.flatten_rows", "flatten_rows"),
    "GPU: rows of several axes, one after another in memory, become rows of one; what depends on one of the axes is found by division.",
)  # fmt: skip
CUT_ROWS = Pass(
    "cut_rows", "program", "program", late("rows.cut_rows", "cut_rows"),
    "Sums over several axes, and long rows that are walked several times, become kernels for stretches of them, one that combines these, and one with a point for each element; on CPUs, sums beside one another.",
    takes=("plans", "target", "hints", "metadata"), gives="plans", needs="reduce",
)  # fmt: skip
SEPARATE_WINDOWS = Pass(
    "separate_windows", "program", "program", late("rows.separate_windows", "separate_windows"),
    "GPU: windows of several axes with many terms are reduced along one axis after the other.", takes=("plans", "target"), gives="plans", needs="reduce",
)  # fmt: skip
SEPARATE_COLUMNS = Pass(
    "separate_columns", "program", "program", late("rows.separate_windows", "separate_columns"),
    "CPU: windows of several axes with many terms are reduced along one axis after the other, down the columns first.", takes=("plans", "target"), gives="plans", needs="reduce",
)  # fmt: skip
SPLIT_REDUCTIONS = Pass(
    "split_reductions", "program", "program", late("program.split_reductions", "split_reductions"),
    "A long reduction with few results becomes two kernels; so does a contraction whose schedule says so (split-K).",
    takes=("plans", "target", "hints"), gives="plans", needs="reduce",
)  # fmt: skip
SPLIT_SCATTERS = Pass(
    "split_scatters", "program", "program", late("scatters.split_scatters", "split_scatters"),
    "Scatters run side by side: on a CPU each part of the points has a copy of what it combines into, on a GPU they are atomics.",
    takes=("plans", "target", "hints", "metadata"), gives="plans", needs="accumulate",
)  # fmt: skip
READ_AHEAD = Pass(
    "read_ahead", "program", "program", late("launches.read_ahead", "read_ahead"),
    "Products with few rows carry what they read of their weights, and read the next step's before they compute.",
    takes=("target", "hints"),
)  # fmt: skip
LAUNCH_TOGETHER = Pass(
    "launch_together", "program", "program", late("launches.launch_together", "launch_together"),
    "GPU: short kernels that need nothing of each other are one launch, each with blocks of its own.",
    takes=("target", "sizes"),
)  # fmt: skip
BLOCK_PROLOGUES = Pass(
    "block_prologues", "program", "program", late("launches.block_prologues", "block_prologues"),
    "GPU: few rows that a short product reads are computed by each of its blocks, in shared memory.",
    takes=("target", "sizes"),
)  # fmt: skip
LAUNCH_EARLY = Pass(
    "launch_early", "program", "program", late("launches.launch_early", "launch_early"),
    "Short kernels of a program of several start before the one before them has ended, and wait for it themselves.",
    takes=("target", "hints"),
)  # fmt: skip
PREFETCH_EARLY = Pass(
    "prefetch_early", "program", "program", late("launches.prefetch_early", "prefetch_early"),
    "Kernels that start early fetch arrays that no kernel of the program writes into the second-level cache while they wait.",
    takes=("target", "hints"),
)  # fmt: skip
SPLIT_SCANS = Pass(
    "split_scans", "program", "program", late("program.split_scans", "split_scans"),
    "A loop that is a scan (a running sum, product, minimum or maximum) is cut into parts that run side by side.",
    takes=("plans", "target", "hints"), gives="plans", needs="for",
)  # fmt: skip
VERSION_RECORDS = Pass(
    "version_records", "program", "program", late("loop.version_records", "version_records"),
    "CPU: kernels that walk the last axis of arrays by constants (`x[i, 0]`, `x[i, 1]`) get a version for arrays that end there.", takes=("plans", "target"), gives="plans", cpu=True,
)  # fmt: skip
STREAM_K = Pass(
    "stream_k", "program", "program", late("program.stream_k", "stream_k"),
    "A contraction whose blocks hand on partial sums gets the memory for them.", takes=("plans", "target"), gives="plans", needs="plans",
)  # fmt: skip
ATTENTION_TERMS = Pass(
    "attention_terms", "program", "program", late("terms.attention_terms", "attention_terms"),
    "Hopper: operands of attention of f32 are written to scratch as three terms of bf16.", takes=PLANNED, gives="plans", needs="plans",
)  # fmt: skip
ADD_COUNTERS = Pass(
    "add_counters", "program", "program", late("program.tile_counters", "add_counters"),
    "A kernel whose blocks fetch their next tile gets the counter that they fetch it from.", takes=PLANNED, gives="plans", needs="plans",
)  # fmt: skip
ONE_PASS_VARIANCE = Pass(
    "one_pass_variance", "loop", "loop", late("loop.one_pass_variance", "one_pass_variance"),
    "A sum, and the squared distances of its terms from their mean, become one pass over long rows.", takes=TARGET, needs="reduce",
)  # fmt: skip
CHOOSE = Pass(
    "choose", "program", "plans", late("choose.plan", "choose_schedules"),
    "Picks tile shape, vector width and warps for each kernel without a plan (`passes/choose/loops.py`); rewrites nothing.",
    takes=("plans", "target", "hints", "metadata"), gives="plans",
)  # fmt: skip
LOWER_LOOPS = Pass(
    "lower_loops", "loop", "tile", late("to_tile.lower_loops", "lower_loops"),
    "Cuts the nest into blocks and tiles; edges become masks (GPU) or single elements (CPU).", takes=SCHEDULED,
)  # fmt: skip
LOWER_GEMV = Pass(
    "lower_gemv", "loop", "tile", late("to_tile.lower_gemv", "lower_gemv"),
    "Products with few rows: a block has some rows of the long factor, and tiles along the sum.", takes=SCHEDULED,
)  # fmt: skip
LOWER_PACKED_ROWS = Pass(
    "lower_packed_rows", "loop", "tile", late("to_tile.lower_packed_rows", "lower_packed_rows"),
    "CPU: rows of packed weights times rounded activations, a few rows at a time.", takes=SCHEDULED,
)  # fmt: skip
LOWER_CONTRACTION = Pass(
    "lower_contraction", "loop", "tile", late("to_tile.lower_contraction", "lower_contraction"),
    "Blocks walk a list of result tiles; each adds up `dot`s of tiles in steps along the sum, then finishes its tile.", takes=SCHEDULED,
)  # fmt: skip
LOWER_CONTRACTION_CPU = Pass(
    "lower_contraction_cpu", "loop", "tile", late("to_tile.lower_contraction_cpu", "lower_contraction_cpu"),
    "Panels are packed for the cache; a register-blocked microkernel has one tile for each row, since LLVM spills a larger one.", takes=SCHEDULED,
)  # fmt: skip
LOWER_PRODUCTS_CPU = Pass(
    "lower_products_cpu", "loop", "tile", late("to_tile.lower_products_cpu", "lower_products_cpu"),
    "Several products of the same rows: rows are packed once, and a block keeps the columns of each second factor.", takes=SCHEDULED,
)  # fmt: skip
LOWER_SYMMETRIC_CPU = Pass(
    "lower_symmetric_cpu", "loop", "tile", late("triangles.lower_symmetric_cpu", "lower_symmetric_cpu"),
    "Products that are symmetric: tiles on and below the diagonal are computed, and finished on both sides of it.", takes=SCHEDULED,
)  # fmt: skip
LOWER_CONTRACTION_AMX = Pass(
    "lower_contraction_amx", "loop", "tile", late("to_tile.lower_contraction_amx", "lower_contraction_amx"),
    "Panels lie as x86's matrix unit takes them, bf16 and 8-bit integers; `panel_dot` multiplies two.", takes=SCHEDULED,
)  # fmt: skip
LOWER_ATTENTION = Pass(
    "lower_attention", "loop", "tile", late("to_tile.lower_attention", "lower_attention"),
    "Attention in one pass: keys in steps, a running maximum, two dots.", takes=SCHEDULED,
)  # fmt: skip
LOWER_ATTENTION_CPU = Pass(
    "lower_attention_cpu", "loop", "tile", late("to_tile.lower_attention_cpu", "lower_attention_cpu"),
    "Attention in one pass: queries along SIMD registers, keys and values as single numbers.", takes=SCHEDULED,
)  # fmt: skip
WATCH_INDICES = Pass(
    "watch_indices", "program", "program", late("program.watch_indices", "watch_indices"),
    "Loads and stores whose index is not proven to lie inside are marked: it is checked as the kernel runs.", takes=("checks", "metadata"),
)  # fmt: skip
CHECK_INDICES = Pass(
    "check_indices", "program", "program", late("to_tile.check_indices", "check_indices"),
    "Marked accesses get tests; the first that fails is left in an array of the program. On a GPU what lies outside is masked out, and the kernel goes on.", takes=TARGET,
    needs="@watch within",
)  # fmt: skip
SHARE_SCATTERS = Pass(
    "share_scatters", "tile", "tile", late("to_tile.share_scatters", "share_scatters"),
    "GPU: the scatters of a block meet in shared memory, and are combined into the array once.", takes=("schedule",), needs="accumulate",
)  # fmt: skip
COUNT_OPERATIONS = Pass(
    "count_operations", "loop", "loop", late("to_tile.count_operations", "count_operations"),
    "Kernels with reductions say how many operations they do, so that a launch knows whether it has work for other threads (CPU).", takes=TARGET, cpu=True, needs="reduce",
)  # fmt: skip
FUSE_LOOPS = Pass(
    "fuse_loops", "tile", "tile", late("to_tile.fuse_loops", "fuse_loops"),
    "Sums side by side over the same range are added up in one loop, and read what they share once.",
)  # fmt: skip
WINDOW_SUMS = Pass(
    "window_sums", "tile", "tile", late("to_thread.window_sums", "window_sums"),
    "Guarded products are sums that a guard chooses, so that they can become `fma`.", takes=("schedule",),
)  # fmt: skip
ASSIGN_LAYOUTS = Pass(
    "assign_layouts", "tile", "tile", late("to_thread.assign_layouts", "assign_layouts"),
    "Gives every tile its layout.", takes=SCHEDULED,
)  # fmt: skip
LOWER_TILES = Pass(
    "lower_tiles", "tile", "thread", late("to_thread.lower_tiles", "lower_tiles"),
    "Tiles become registers, reductions become shuffles and shared memory, loads and stores are wide where alignment is proven.", takes=TARGET,
)  # fmt: skip
LOWER_ROW_DOTS = Pass(
    "lower_row_dots", "tile", "thread", late("to_thread.row_matrix", "lower_row_dots"),
    "Lanes walk a row, each with a sum of its own that they put together at the end; all loads of a step are on their way at once.", takes=TARGET,
)  # fmt: skip
STAGE_UNITS = Pass(
    "stage_units", "program", "program", late("packed.stage_units", "stage_units"),
    "GPU: what packed rows are multiplied with is laid out for the lanes that read it.", takes=("plans",), gives="plans", needs="plans",
)  # fmt: skip
UNPACK_WEIGHTS = Pass(
    "unpack_weights", "program", "program", late("packed.unpack_weights", "unpack_weights"),
    "Packed weights of products with many rows are unpacked to scratch first, on a GPU in the dtype that they are multiplied in.", takes=PLANNED, gives="plans", needs="plans",
)  # fmt: skip
SPLIT_TERMS = Pass(
    "split_terms", "program", "program", late("terms.split_terms", "split_terms"),
    "Hopper: factors of f32 are written to scratch as three terms of bf16, and products become six of these.", takes=PLANNED, gives="plans", needs="plans",
)  # fmt: skip
PACKED_UNITS = Pass(
    "packed_units", "loop", "loop", late("packed.units", "packed_units"),
    "GPU: sums over packed rows walk units of blocks, whose bytes are read as words and whose scales are applied once.", takes=("schedule",),
)  # fmt: skip
MERGE_LOADS = Pass(
    "merge_loads", "thread", "thread", late("late.merge_loads", "merge_loads"),
    "Loads of neighbouring elements become one.",
)  # fmt: skip
MERGE_STORES = Pass(
    "merge_stores", "thread", "thread", late("late.merge_stores", "merge_stores"),
    "Stores of neighbouring elements become one.",
)  # fmt: skip
CHOOSE_VALUES = Pass(
    "choose_values", "thread", "thread", late("ordered.choose_values", "choose_values"),
    "CPU: short branches in loops that only choose a value become `select`; loads whose place surely exists are done anyway.", needs="if",
)  # fmt: skip
SHORT_REMAINDERS = Pass(
    "short_remainders", "thread", "thread", late("ordered.short_remainders", "short_remainders"),
    "CPU: remainders of numbers that are surely less than twice the divisor become a comparison and a subtraction.", needs="mod",
)  # fmt: skip
INTERLEAVE = Pass(
    "interleave", "thread", "thread", late("late.interleave", "interleave"),
    "CPU: vectors that take every second element, or third or fourth, and lie in between each other are read and written as whole ones.", takes=TARGET,
    needs="pack extract",
)  # fmt: skip
FETCH_RESULTS = Pass(
    "fetch_results", "thread", "thread", late("late.fetch_results", "fetch_results"),
    "CPUs with AVX-512: loops that write whole vectors one after the other ask for lines that they will write to.", takes=TARGET, needs="for",
)  # fmt: skip
OUTLINE = Pass(
    "outline", "thread", "thread", late("common.outline", "outline"),
    "CPU: code beside an innermost loop that fills the registers is marked to become a function of its own.", takes=TARGET, needs="broadcast",
)  # fmt: skip
FETCH_ROWS = Pass(
    "fetch_rows", "thread", "thread", late("late.fetch_rows", "fetch_rows"),
    "The first rows of a product are asked for before the kernel launched before has ended.", takes=("schedule",),
)  # fmt: skip
EARLY_LOADS = Pass(
    "early_loads", "thread", "thread", late("late.early_loads", "early_loads"),
    "Loads of arrays that a kernel only reads come before its first barrier.",
)  # fmt: skip
LOWER_WINDOWS = Pass(
    "lower_windows", "tile", "thread", late("to_thread.lower_windows", "lower_windows"),
    "Neighbouring results of a thread share what they load, by predicated loads; only guards at the borders are tested.", takes=TARGET,
)  # fmt: skip
LOWER_TURNED = Pass(
    "lower_turned", "tile", "thread", late("to_thread.lower_turned", "lower_turned"),
    "Values that lie along another index than results go through shared memory: both are accessed in whole lines.", takes=TARGET,
)  # fmt: skip
LOWER_WGMMA = Pass(
    "lower_wgmma", "tile", "thread", late("to_thread.wgmma.lower_wgmma", "lower_wgmma"),
    "Hopper: one warp group copies, the others multiply; rings in shared memory have full and empty mbarriers.", takes=SCHEDULED,
)  # fmt: skip
LOWER_MMA = Pass(
    "lower_mma", "tile", "thread", late("to_thread.mma.lower_mma", "lower_mma"),
    "Any GPU: all warps copy and multiply, by `mma` or by plain `fma`; long sums are added up in levels.", takes=SCHEDULED,
)  # fmt: skip
LOWER_WGMMA_ATTENTION = Pass(
    "lower_wgmma_attention", "tile", "thread", late("to_thread.attention.lower_wgmma_attention", "lower_wgmma_attention"),
    "Attention with Hopper's warp groups: scores, weights and sums stay in registers.", takes=SCHEDULED,
)  # fmt: skip
LOWER_MMA_ATTENTION = Pass(
    "lower_mma_attention", "tile", "thread", late("to_thread.attention.lower_mma_attention", "lower_mma_attention"),
    "Attention with `mma` of single warps: any GPU that copies asynchronously.", takes=SCHEDULED,
)  # fmt: skip
MINMAX_BEFORE_WIDENING = Pass(
    "minmax_before_widening", "thread", "thread", late("late.minmax_before_widening", "minmax_before_widening"),
    "GPU: the larger of two widened numbers is found before they are widened.", takes=TARGET, needs="cast",
)  # fmt: skip
EXPAND_MATH = Pass(
    "expand_math", "thread", "thread", late("late.expand_math", "expand_math"),
    "Functions become arithmetic.", takes=TARGET, needs=" ".join(_FUNCTIONS),
)  # fmt: skip
EXPAND_RANDOM = Pass(
    "expand_random", "thread", "thread", late("late.expand_random", "expand_random"),
    "Random numbers become the arithmetic of Philox; neighbours in a vec share its blocks.", takes=TARGET,
    needs=" ".join(_RANDOM),
)  # fmt: skip
EXPAND_CASTS = Pass(
    "expand_casts", "thread", "thread", late("late.expand_casts", "expand_casts"),
    "Conversions without an instruction become arithmetic.", takes=TARGET, needs="cast",
)  # fmt: skip
DIVIDE_BY_RECIPROCAL = Pass(
    "divide_by_reciprocal", "thread", "thread", late("late.divide_by_reciprocal", "divide_by_reciprocal"),
    "Vectors divided by one number are multiplied with its reciprocal: on a CPU corrected, to the same bits; on a GPU where few bits count.", takes=TARGET, needs="div",
)  # fmt: skip
PERSISTENT_KERNEL = Pass(
    "persistent_kernel", "program", "program", late("program.persistent_kernel", "persistent_kernel"),
    "All kernels become loops over their blocks in one kernel that stays, with a `grid_barrier` between those that depend on each other.",
)  # fmt: skip
TIME_TILES = Pass(
    "time_tiles", "program", "program", late("ordered.time_tiles", "time_tiles"),
    "GPU: a stencil in an ordered loop takes several steps for each tile in shared memory, with a frame that is computed more than once.",
    takes=("target", "loop", "hints"),
)  # fmt: skip
ORDERED_KERNELS = Pass(
    "ordered_kernels", "program", "program", late("ordered.ordered_kernels", "ordered_kernels"),
    "The calls of each ordered loop become one kernel that holds the loop: its blocks meet between calls (GPU), or one thread hands them out (CPU).",
    takes=TARGET,
)  # fmt: skip
REUSE_BUFFERS = Pass(
    "reuse_buffers", "program", "program", late("program.reuse_buffers", "reuse_buffers"),
    "Arrays between kernels that are never needed at the same time lie in the same memory.", takes=("loop",),
)  # fmt: skip
CHECK_BOUNDS = Pass(
    "check_bounds", "program", "program", late("late.bounds_checks", "check_bounds"),
    "Every access gets a test that it stays in its array; the first failure is left in an array that the launch is given.", gives="sites",
)  # fmt: skip
SPLIT_VECTORS = Pass(
    "split_vectors", "thread", "thread", late("simt_to_simd.split_vectors", "split_vectors"),
    "GPU: the SIMD values of `@tw.cpu` functions become single numbers.",
)  # fmt: skip
SPLIT_REGISTERS = Pass(
    "split_registers", "thread", "thread", late("portable.split_registers", "split_registers"),
    "Vectors stay where memory is read and written, four numbers each; in registers they become single numbers.",
)  # fmt: skip
EXACT_FUNCTIONS = Pass(
    "exact_functions", "thread", "thread", late("late.exact_functions", "exact_functions"),
    "CPU: functions that GPUs approximate become the exact ones.",
)  # fmt: skip
SIMT_TO_SIMD = Pass(
    "simt_to_simd", "thread", "thread", late("simt_to_simd.lower_threads", "simt_to_simd"),
    "CPU: neighbouring threads become the lanes of vectors, and blocks become loops that barriers cut.", takes=TARGET,
)  # fmt: skip
FLAT_ACCESSES = Pass(
    "flat_accesses", "thread", "thread", late("late.flat_accesses", "flat_accesses"),
    "Arrays become rows, so that neighbouring accesses share one address.",
)  # fmt: skip
INDICES_TO_I32 = Pass(
    "indices_to_i32", "thread", "thread", late("late.indices_to_i32", "indices_to_i32"),
    "Indices that are proven to fit are computed in 32 bits.",
)  # fmt: skip
EXPAND_ATOMICS = Pass(
    "expand_atomics", "thread", "thread", late("portable.expand_atomics", "expand_atomics"),
    "Atomic updates that the target has not become loops of compare-and-swap.", takes=TARGET,
)  # fmt: skip
SHORT_NUMBERS = Pass(
    "short_numbers", "program", "program", late("portable.short_numbers", "short_numbers"),
    "Numbers of a call that kernels round to f32 are passed as f32.",
)  # fmt: skip
WARPS_TO_SHARED = Pass(
    "warps_to_shared", "thread", "thread", late("portable.warps_to_shared", "warps_to_shared"),
    "What the lanes of a warp do together goes through shared memory.", takes=TARGET,
)  # fmt: skip
NARROW_INDICES = Pass(
    "narrow_indices", "thread", "thread", late("portable.narrow_indices", "narrow_indices"),
    "Integers of 64 bits become integers of 32 where a launch can check that they fit.",
)  # fmt: skip
COUNT_TURNS = Pass(
    "count_turns", "thread", "thread", late("portable.count_turns", "count_turns"),
    "The iterations of a thread's loops are counted, for a driver that leaves loops after so many.", takes=TARGET,
)  # fmt: skip

# -- lowerings that a schedule and a target choose --------------------------------------------------------------------


@record
class LoweringRule:
    """Schedules that name this lowering (`to_tile`, `to_thread`), in words."""

    text: str
    lowering: Pass


TO_TILE: tuple[LoweringRule, ...] = (
    LoweringRule("contractions with a CPU's matrix unit", LOWER_CONTRACTION_AMX),
    LoweringRule("attention on a CPU", LOWER_ATTENTION_CPU),
    LoweringRule("products side by side on a CPU", LOWER_PRODUCTS_CPU),
    LoweringRule("symmetric products on a CPU", LOWER_SYMMETRIC_CPU),
    LoweringRule("contractions on a CPU", LOWER_CONTRACTION_CPU),
    LoweringRule("attention on a GPU", LOWER_ATTENTION),
    LoweringRule("contractions on a GPU", LOWER_CONTRACTION),
    LoweringRule("products with few rows on a GPU", LOWER_GEMV),
    LoweringRule("packed weights times rounded activations on a CPU", LOWER_PACKED_ROWS),
    LoweringRule("all other kernels", LOWER_LOOPS),
)
"""From the loop to the tile stage."""
TO_THREAD: tuple[LoweringRule, ...] = (
    LoweringRule("contractions, `family=wgmma`", LOWER_WGMMA),
    LoweringRule("attention, `family=attention`", LOWER_WGMMA_ATTENTION),
    LoweringRule("attention, `family=attention_mma`", LOWER_MMA_ATTENTION),
    LoweringRule("other contractions on a GPU", LOWER_MMA),
    LoweringRule("products with few rows, `family=gemv`", LOWER_ROW_DOTS),
    LoweringRule("windows that overlap, on a GPU", LOWER_WINDOWS),
    LoweringRule("pixels that become rows, on a GPU", LOWER_TURNED),
    LoweringRule("all other kernels", LOWER_TILES),
)
"""From the tile to the thread stage."""
_TO_TILE = {rule.lowering.name: rule.lowering for rule in TO_TILE}
_TO_THREAD = {rule.lowering.name: rule.lowering for rule in TO_THREAD}


def to_tile_pass(schedule: Plan, target: Target) -> Pass:
    """The lowering from the loop to the tile stage, which the schedule names."""
    assert schedule is not None
    return _TO_TILE[schedule.to_tile]


def to_thread_pass(schedule: Plan, target: Target) -> Pass:
    """The lowering from the tile to the thread stage, which the schedule names."""
    assert schedule is not None
    return _TO_THREAD[schedule.to_thread]


PICK_TO_TILE = Selection("to_tile", to_tile_pass, tuple(rule.lowering for rule in TO_TILE))
PICK_TO_THREAD = Selection("to_thread", to_thread_pass, tuple(rule.lowering for rule in TO_THREAD))

# -- the orders -------------------------------------------------------------------------------------------------------

UNPLANNED_CPU = When("kernels without a plan, on a CPU", lambda kernel, context: context.schedule is None and not context.simt)
UNPLANNED = When("kernels without a plan", lambda kernel, context: context.schedule is None)
CHOSEN_CPU = When("on a CPU", lambda kernel, context: context.target is not None and not context.simt)
ON_CPU = When("on a CPU", lambda kernel, context: not context.simt)
SHORT_INDICES = When("where a target counts in 32 bits", lambda kernel, context: context.target is not None and context.target.index_bits < 64)
NO_FLOAT_ATOMICS = When("where a target has no atomics of floats", lambda kernel, context: context.target is not None and not context.target.atomic_floats)
NO_WARPS = When("where a target has no warps", lambda kernel, context: context.simt and context.target is not None and not context.target.has_warps)
MEMORY_VECTORS = When("where a target has vectors in memory alone", lambda kernel, context: context.target is not None and context.target.has("vec4"))
NO_VECTORS = When("where a target has no vectors", lambda kernel, context: context.target is not None and not context.target.vectors and not context.target.has("vec4"))
NO_WIDE_INTS = When("where a target has no 64-bit integers", lambda kernel, context: context.target is not None and not context.target.wide_ints)
LIMITED_TURNS = When("where a driver limits the iterations of loops", lambda kernel, context: context.target is not None and bool(context.target.max_turns))
WITH_LANES = When(
    "on a GPU, kernels with SIMD values",
    lambda kernel, context: context.simt and any(OPS[op.opcode].group == "lanes" for op in walk(kernel.body)),
)
WITH_WINDOWS = When("windows that overlap, on a GPU", lambda kernel, context: isinstance(context.schedule, Schedule) and context.schedule.window)
WITH_FLAT_ROWS = When("rows of several axes that registers hold, on a GPU", lambda kernel, context: isinstance(context.schedule, Schedule) and context.schedule.flat)
WITH_UNITS = When("products of packed rows, `family=gemv`", lambda kernel, context: isinstance(context.schedule, Gemv) and context.schedule.unit > 1)
UNPACKING = When("kernels that unpack weights, on a GPU", lambda kernel, context: context.simt and "unpacks" in kernel.attrs)
BRINGS_PACKED = When("products that unpack as they go", lambda kernel, context: isinstance(context.schedule, GpuProduct) and context.schedule.b_copy == "packed")
WITH_WORDS = When(
    "products of packed rows, kernels that unpack weights, and attention to packed keys and values",
    lambda kernel, context: any(when.holds(kernel, context) for when in (WITH_UNITS, UNPACKING, BRINGS_PACKED)) or bool(kernel.attrs.get("computed")),
)
WITH_SEVERAL = When(
    "products with few rows side by side, `family=gemv`, sums across rows on a GPU, and sums on a CPU",
    lambda kernel, context: (isinstance(context.schedule, Gemv) and context.schedule.horizontal > 1)
    or (isinstance(context.schedule, Schedule) and (context.schedule.across_rows or not context.simt)),
)
WITH_PARTS = When("sums of parts of attention, on a GPU", lambda kernel, context: context.simt and bool(kernel.attrs.get("sums_parts")))
WITH_FETCH = When("products with few rows that fetch ahead", lambda kernel, context: isinstance(context.schedule, Gemv) and context.schedule.fetch > 0)
WITH_OWN_SUMS = When(
    "windows that overlap, and products with few rows, on a GPU; windows and sums across rows on a CPU",
    lambda kernel, context: isinstance(context.schedule, Gemv) or (isinstance(context.schedule, Schedule) and (context.schedule.window or context.schedule.repeat or context.schedule.row_group > 0)),
)

ORDERS: Mapping[str, tuple[Step, ...]] = MappingProxyType({
    "kernel": (
        Step(LOWER_TREE, "The first: everything after it works on IR alone."),
        Step(UNPACK_BLOCKS, "The rest of the compiler knows no packed dtypes."),
        Step(WHOLE_WINDOWS, "Before accesses are checked: places in a window are then numbers of its loops."),
        Step(GUARD_CHECKS, "The program is still as its author wrote it, so that messages name what the author knows."),
    ),
    "blocks": (
        Step(LOWER_TREE, "Each block is lowered as if it were alone."),
        Step(LINK_BLOCKS, "Fusion must see all blocks as one program."),
        Step(UNPACK_BLOCKS, "As for one kernel."),
        Step(WHOLE_WINDOWS, "As for one kernel."),
        Step(GUARD_CHECKS, "As for one kernel."),
    ),
    "index checks": (
        Step(WATCH_INDICES, "Accesses and conditions are still those of the author; the passes below carry the marks."),
    ),
    "fusion": (
        Step(SIMPLIFY, "Equal indices are the same value before they are compared."),
        Step(DROP_EMPTY, "After simplify, which finds conditions that cannot hold."),
        Step(UNTILE, "Fusion compares whole indices, not pairs of them."),
        Step(DROP_OVERWRITTEN, "After simplify, which makes equal places the same values; fusion asks how often an array is written."),
        Step(HOIST, "A reduction inside a loop hides that two kernels walk the same rows."),
        Step(RECOVER_REDUCTIONS, "Fusion knows reductions, not loops that carry them."),
        Step(FOLD_FILLS, "After hoist, so that sums stand beside what they are added to; before fuse, which asks how often an array is written."),
        Step(FUSE, "Before all that looks at one kernel only."),
    ),
    "sizes": (
        Step(SPECIALISE, "Before the loop passes, which know more of constants."),
    ),
    "loop": (
        Step(SIMPLIFY, "All passes of the loop stage see short code."),
        Step(DROP_EMPTY, "After simplify, also where a size has become a constant."),
        Step(UNTILE, "All that follows recognises nests by whole indices."),
        Step(DROP_OVERWRITTEN, "After simplify, as above, in kernels that are alone; products store each result once."),
        Step(SHARE_LOADS, "After simplify, which makes equal places the same values; before all that asks what a branch computes."),
        Step(HOIST, "After untile, which makes equal reductions look equal."),
        Step(RECOVER_REDUCTIONS, "After hoist: what a loop carries is then all that is left in it."),
        Step(PROMOTE_LOOPS, "After hoist: sums stand in the loops that they need."),
        Step(CUT_GROUPS, "After hoist: sums stand in the loops that they need. Products are recognised after it."),
        Step(GATHER_SUMS, "After hoist; the sums it writes are joined by join_guards."),
        Step(JOIN_GUARDS, "After hoist, which takes sums that stand still out of conditions; windows are recognised by one condition."),
        Step(COPY_BORDERS, "After join_guards, which brings sums together; windows are recognised after it."),
        Step(NARROW_ARRAYS, "After join_guards: products and windows are recognised after it."),
        Step(SINGLE_PLACES, "After join_guards: a condition has all tests of a sum."),
        Step(SQUARE_RESULTS, "Before square_triangles, which sees the sums of all results."),
        Step(SQUARE_TRIANGLES, "Beside join_guards: the condition it writes is one."),
        Step(MULTIPLY_TAPS, "After join_guards, as split_phases, which takes what it leaves."),
        Step(PLACE_TAPS, "Beside multiply_taps."),
        Step(SPLIT_PHASES, "After join_guards: a condition has all tests of a sum."),
        Step(EMPTY_ROWS, "Needs the maximum and sums that recover_reductions finds."),
        Step(SPLIT_AXES, "Before collapse, which would join axes that have to be apart."),
        Step(DROP_SINGLE, "Before collapse, which merges the loops that are left.", CHOSEN_CPU),
        Step(COLLAPSE, "After untile and split_axes: indices are now those of the arrays."),
        Step(SHIFTED_VARIANCE, "Before products and sums become `fma`."),
        Step(STABILISE, "Before products and sums become `fma`."),
        Step(FUSE_MULTIPLY_ADD, "Once for all targets, so that all round in the same places."),
        Step(MARK_LOW_PRECISION, "Marks the functions that the passes before it leave."),
        Step(FISSION_PRODUCTS, "After all that writes sums: it recognises finished products."),
        Step(FISSION_SCATTERS, "After hoist and recover_reductions: loops before a scatter are as short as they get. Small sizes are chosen for its kernels."),
        Step(STAGE_ATTENTION, "Last: it recognises finished attention; its products are planned as such."),
    ),
    "plan": (
        Step(PLAN, "The passes that follow add and join kernels by plan."),
    ),
    "program": (
        Step(FUSE_HORIZONTALLY, "First: the joined kernel is what the passes below prepare."),
        Step(UNPACK_WEIGHTS, "Before all that prepares operands, which are plain arrays after it."),
        Step(SPLIT_TERMS, "As unpack_weights: the factors are plain arrays after it."),
        Step(ROW_PROLOGUES, "After fuse_horizontally: rows that two products read are computed once in the kernel that has both."),
        Step(ROW_MAPS, "After row_prologues: rows that products compute themselves are no kernels any more."),
        Step(SPLIT_BLOCKS, "Before reductions are split, whose parts begin anywhere; contractions unpack as they copy panels.", UNPLANNED_CPU),
        Step(SEPARATE_COLUMNS, "Before clip_windows: windows are still of known length."),
        Step(CLIP_WINDOWS, "Before pad_windows: sums that end at the border need no frame.", UNPLANNED),
        Step(PAD_WINDOWS, "Before kernels are lowered with the guards it removes."),
        Step(GATHER_PHASES, "Before images are copied: kernels of phases still stand one after another."),
        Step(SPLIT_IMAGES, "Beside to_channels_last: what it makes has channels last, and nothing is left to pack."),
        Step(TO_CHANNELS_LAST, "Before repack, which would pack what the copy engine reads after this."),
        Step(WINDOW_ROWS, "After to_channels_last, which turns images whose windows are gathered."),
        Step(REPACK, "After to_channels_last: packs what the copy engine still cannot read."),
        Step(SPLIT_ATTENTION, "Before widen_operands: the first of its kernels is attention itself, of parts of the keys."),
        Step(WIDEN_OPERANDS, "Beside the other copies of operands."),
        Step(FLATTEN_ROWS, "Before rows are lowered, which have one axis.", WITH_FLAT_ROWS),
        Step(SEPARATE_WINDOWS, "Before reductions are cut: windows are short."),
        Step(CUT_ROWS, "Before split_reductions, which cuts the sums over one axis that it leaves."),
        Step(SPLIT_REDUCTIONS, "After copies of operands: each part of the sum reads the copies."),
        Step(SPLIT_SCATTERS, "Beside split_reductions: the kernels it makes have few results and long loops, but are cut already."),
        Step(SPLIT_SCANS, "Beside split_reductions: the parts are kernels like others."),
        Step(VERSION_RECORDS, "After all that splits kernels: a version is not split again."),
        Step(STREAM_K, "Adds parameters that the lowering alone uses; kernels are otherwise done."),
        Step(ATTENTION_TERMS, "As stream_k."),
        Step(ADD_COUNTERS, "After attention_terms: the counter is the last parameter."),
        Step(STAGE_UNITS, "Adds a kernel; before packed_units, which takes its index apart."),
        Step(PACKED_UNITS, "What split_blocks is for sums without a plan; the code is long, so it comes late.", WITH_UNITS),
        Step(ONE_PASS_VARIANCE, "After split_reductions: only rows that stay in one kernel.", UNPLANNED),
        Step(SIMPLIFY, "Lowerings see short code."),
    ),
    "tile": (
        Step(JOIN_PHASES, "The kernels are final; those that are joined are lowered once."),
        Step(CHOOSE, "The kernels are final, and their lowering needs a schedule."),
        Step(COUNT_OPERATIONS, "Before the lowering: loops still have their lengths."),
        Step(PICK_TO_TILE, "The schedule and the target choose the lowering."),
        Step(SIMPLIFY, "Drops masks that are proven, shares indices."),
        Step(FUSE_LOOPS, "After simplify, which makes equal ranges the same values.", WITH_SEVERAL),
        Step(WINDOW_SUMS, "After simplify, which leaves one guard for each sum.", WITH_WINDOWS),
        Step(FUSE_MULTIPLY_ADD, "window_sums and lower_gemv leave products beside their sums.", WITH_OWN_SUMS),
        Step(CHECK_INDICES, "Accesses are those of tiles now, with their masks."),
        Step(SHARE_SCATTERS, "After check_indices: indices are still those of the array there."),
        Step(ASSIGN_LAYOUTS, "Last: the tiles are final."),
    ),
    "thread": (
        Step(PICK_TO_THREAD, "The schedule and the target choose the lowering."),
        Step(SIMPLIFY, "Folds index arithmetic of the lowering."),
        Step(EXPAND_DOTS, "Before simplify's last turn, which shares what rows have in common.", ON_CPU),
        Step(DOT_PRODUCTS, "Before casts become arithmetic.", ON_CPU),
        Step(CHOOSE_VALUES, "After simplify, which makes equal places the same value.", ON_CPU),
        Step(SHORT_REMAINDERS, "Before simplify's last turn.", ON_CPU),
        Step(INTERLEAVE, "After simplify, which makes equal places the same value.", ON_CPU),
        Step(FETCH_RESULTS, "After interleave, whose stores are whole vectors.", ON_CPU),
        Step(MERGE_LOADS, "After simplify, which makes equal places the same value.", WITH_WORDS),
        Step(MERGE_STORES, "Beside merge_loads.", UNPACKING),
        Step(FUSE_MULTIPLY_ADD, "What unpacks is written by the lowering.", BRINGS_PACKED),
        Step(FETCH_ROWS, "After merge_loads: one fetch for what one load reads.", WITH_FETCH),
        Step(EARLY_LOADS, "After simplify, which leaves each load once.", WITH_PARTS),
        Step(MINMAX_BEFORE_WIDENING, "Before casts become arithmetic."),
        Step(EXPAND_MATH, "Functions may contain casts, so they are expanded first."),
        Step(EXPAND_RANDOM, "Beside expand_math, for the same reason."),
        Step(EXPAND_CASTS, "After expand_math."),
        Step(DIVIDE_BY_RECIPROCAL, "After expand_math, whose divisions it sees too."),
        Step(SIMPLIFY, "Code generators see short code."),
        Step(OUTLINE, "Last: functions are arithmetic, and no pass takes code apart afterwards.", ON_CPU),
        Step(PART_PHASES, "After the last pass of kernels."),
    ),
    "launches": (
        Step(READ_AHEAD, "First: each product is still a kernel of its own."),
        Step(LAUNCH_TOGETHER, "Kernels are final: only how they are launched is left to arrange."),
        Step(BLOCK_PROLOGUES, "After launch_together: products that are launched together compute their rows once."),
        Step(LAUNCH_EARLY, "Whether a kernel is short is known once its grid is, and nothing may come before its wait."),
        Step(PREFETCH_EARLY, "After launch_early, which adds waits; addresses are final."),
    ),
    "ordered loops": (
        Step(TIME_TILES, "Calls are still apart, and the loop stage says what a step computes."),
        Step(ORDERED_KERNELS, "Kernels are final: only the order of their blocks is left to arrange."),
    ),
    "one launch": (
        Step(PERSISTENT_KERNEL, "Kernels are final: only their blocks and barriers are left to arrange."),
    ),
    "memory": (
        Step(REUSE_BUFFERS, "Last: the list of kernels and arrays is final."),
    ),
    "explicit checks": (
        Step(CHECK_BOUNDS, "First: accesses are still those of the author, at the author's lines."),
    ),
    "explicit": (
        Step(SPLIT_VECTORS, "GPUs have no such vectors; all that follows sees numbers.", WITH_LANES),
        Step(SIMPLIFY, "All that follows sees short code."),
        Step(FUSE_MULTIPLY_ADD, "As for other kernels: all targets round in the same places."),
        Step(EXACT_FUNCTIONS, "Before functions become arithmetic.", ON_CPU),
        Step(SIMT_TO_SIMD, "Before functions become arithmetic, which is then that of vectors.", ON_CPU),
        Step(SIMPLIFY, "Folds what simt_to_simd writes for lanes that do the same.", ON_CPU),
        Step(EXPAND_MATH, "Functions may contain casts, so they are expanded first."),
        Step(EXPAND_RANDOM, "Beside expand_math, for the same reason."),
        Step(EXPAND_CASTS, "After expand_math."),
        Step(SIMPLIFY, "This is what the emulator runs; code generators see short code."),
    ),
    "critical": (
        Step(SIMPLIFY, "All that follows sees short code. Products and sums are not fused: floats are those of Python."),
        Step(EXACT_FUNCTIONS, "Before functions become arithmetic."),
        Step(EXPAND_MATH, "Functions may contain casts, so they are expanded first. Nothing may be left for a library."),
        Step(EXPAND_RANDOM, "Beside expand_math, for the same reason."),
        Step(EXPAND_CASTS, "After expand_math."),
        Step(SIMPLIFY, "Code generators see short code."),
    ),
    "explicit addresses": (
        Step(FLAT_ACCESSES, "After the emulator's stage, which keeps the author's indices."),
        Step(SIMPLIFY, "Shares the addresses."),
        Step(INDICES_TO_I32, "After addresses are shared: each is narrowed once.", SHORT_INDICES),
        Step(SIMPLIFY, "Drops conversions that cancel."),
    ),
    "primitives": (
        Step(SIMPLIFY, "All that follows sees short code."),
        Step(EXPAND_MATH, "Functions may contain casts, so they are expanded first."),
        Step(EXPAND_RANDOM, "Beside expand_math, for the same reason."),
        Step(EXPAND_CASTS, "After expand_math."),
        Step(SIMPLIFY, "This is what the emulator runs; code generators see short code."),
    ),
    "portable": (
        Step(SHORT_NUMBERS, "The host rounds as the kernel would."),
        Step(SPLIT_REGISTERS, "What follows sees numbers.", MEMORY_VECTORS),
        Step(SPLIT_VECTORS, "What follows sees numbers.", NO_VECTORS),
        Step(WARPS_TO_SHARED, "After vectors, whose elements are exchanged one by one.", NO_WARPS),
        Step(EXPAND_ATOMICS, "After vectors, whose elements are updated one by one.", NO_FLOAT_ATOMICS),
        Step(SIMPLIFY, "Each index is there once before it is narrowed.", NO_WIDE_INTS),
        Step(NARROW_INDICES, "Last: all integers are there.", NO_WIDE_INTS),
        Step(SIMPLIFY, "Drops conversions that cancel.", NO_WIDE_INTS),
        Step(COUNT_TURNS, "Last: these are the loops that run.", LIMITED_TURNS),
    ),
    "functions": (
        Step(LOWER_TREE, "A function is checked and lowered as the body of a loop over arrays."),
        Step(SIMPLIFY, "The ops that are put into a primitive are few."),
        Step(FUSE_MULTIPLY_ADD, "As for kernels: all targets round in the same places."),
    ),
})  # fmt: skip
"""Every order of passes; ARCHITECTURE.md says which kernels take which."""
TITLES: Mapping[str, str] = MappingProxyType({
    "kernel": "From the tree: one kernel",
    "blocks": "From the tree: joined blocks of a pipeline",
    "index checks": "Checks of indices",
    "fusion": "Programs of several kernels: fusion",
    "sizes": "Programs with small sizes in their sums",
    "loop": "The loop stage, for any sizes",
    "plan": "Plans, for the sizes of a call",
    "program": "The loop stage, by plan",
    "tile": "To the tile stage",
    "thread": "To the thread stage",
    "launches": "Programs of several kernels on a GPU: launches",
    "ordered loops": "Programs with ordered loops",
    "one launch": "Programs with `launches=1` on a GPU",
    "memory": "Programs of several kernels: memory",
    "explicit checks": "Explicit kernels with `check=True`",
    "explicit": "Explicit kernels: GPU, CPU and emulator",
    "critical": "Critical functions",
    "explicit addresses": "Explicit kernels: code for a GPU",
    "primitives": "Primitives",
    "portable": "Portable GPUs: what a target lacks",
    "functions": "Functions that are given to primitives",
})  # fmt: skip
"""What the table of passes calls each order."""


def all_passes() -> Iterator[Pass]:
    """Every pass, once, in the order of its first appearance."""
    steps = [step for order in ORDERS.values() for step in order]
    yield from dict.fromkeys(one for step in steps for one in step.passes)


def loaders() -> Iterator[Callable[[], object]]:
    """What loads the modules of all passes, one by one."""
    for one in all_passes():
        if isinstance(one.function, LateFunction):
            yield lambda function=one.function: function.loaded  # type: ignore[misc]
    for name in ("attention", "gemv", "hints", "horizontal_fusion", "matrix", "refusals"):
        yield functools.partial(importlib.import_module, f"tilewright.passes.choose.{name}")
