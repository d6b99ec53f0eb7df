"""Code of primitives: every program assembles for old and new GPUs, and says what its launches need."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from assembled import assemble
from tilewright.base.dtypes import bf16, bool_, f8e4m3, f8e5m2, f16, f32, f64, i8, i64, u8, u16, u32, u64
from tilewright.base.target import Target, parse_target
from tilewright.compile.build import build_artifact
from tilewright.compile.primitives import finished_program
from tilewright.frontend.python.functions import parse_scalar_function
from tilewright.ir.program import Program
from tilewright.primitives.filter import filter_program, runs_program
from tilewright.primitives.functions import Monoid, scalar_function
from tilewright.primitives.gather import heads_program, take_program, words_program
from tilewright.primitives.histogram import histogram_program, histogram_table
from tilewright.primitives.reduce import reduce_program
from tilewright.primitives.rows import row_shape, rows_program
from tilewright.primitives.scan import scan_program
from tilewright.primitives.scan_columns import columns_scan_program
from tilewright.primitives.scan_plan import ScanPlan, Segments, StateFunction
from tilewright.primitives.scan_rows import RowsShape, gpu_rows_scan_program
from tilewright.primitives.sort import SortPlan, sort_program
from tilewright.primitives.transpose import transpose_program

LAST = Monoid(f32, function=scalar_function(parse_scalar_function(lambda a, b: b), (f32, f32), f32))
POSITIVE = scalar_function(parse_scalar_function(lambda v: v > 0), (f32,), bool_)
PAIRS = ScanPlan(
    (f64, i8), (f64, i8),
    StateFunction(functions=tuple(scalar_function(parse_scalar_function(f), (f64, i8, f64, i8), d) for f, d in ((lambda a, b, c, d: a * c, f64), (lambda a, b, c, d: b + d, i8))), segmented=True),
    exclusive=True, init=True, reverse=True, segments=Segments("ids", i64, False),
)  # fmt: skip
SUMS = ScanPlan((f32,), (f32,), StateFunction(Monoid(f32, "add")))
PROGRAMS: dict[str, Callable[[Target], Program]] = {
    "scan": lambda t: scan_program(ScanPlan((f32,), (f32,), StateFunction(Monoid(f32, "add"))), t),
    "scan f16": lambda t: scan_program(ScanPlan((f16,), (f16,), StateFunction(Monoid(f32, "max")), exclusive=True, init=True), t, aligned=False),
    "scan f64": lambda t: scan_program(ScanPlan((f64,), (f64,), StateFunction(Monoid(f64, "mul"))), t),
    "scan of a function": lambda t: scan_program(ScanPlan((f32,), (f32,), StateFunction(LAST)), t),
    "scan of reversed rows": lambda t: scan_program(ScanPlan((f16,), (f16,), StateFunction(Monoid(f32, "add"), segmented=True), reverse=True), t, rows=True),
    "scan of segments of pairs": lambda t: scan_program(PAIRS, t, aligned=False, rows=True),
    "scan of short rows": lambda t: gpu_rows_scan_program(SUMS, RowsShape(128, 8, 4, 2, 32), False),
    "scan of long rows": lambda t: gpu_rows_scan_program(SUMS, RowsShape(256, 128, 4, 4, 32), True),
    "scan of rows of pairs": lambda t: gpu_rows_scan_program(PAIRS, RowsShape(128, 128, 2, 2, 32), True),
    "scan of columns": lambda t: columns_scan_program(ScanPlan((f32,), (f32,), StateFunction(Monoid(f32, "add"))), t, 1),
    "scan of columns in chunks": lambda t: columns_scan_program(PAIRS, t, 64),
    "filter": lambda t: filter_program(f32, POSITIVE, t),
    "filter by a mask": lambda t: filter_program(i64, None, t, aligned=False),
    "heads": lambda t: filter_program(i8, None, t, heads=True),
    "places of trues": lambda t: filter_program(bool_, None, t, trues=True),
    "slices in vectors": lambda t: take_program(f16, t, 8, False),
    "slices of bools": lambda t: take_program(bool_, t, 1, True),
    "words of columns": lambda t: words_program(bf16, u64, t),
    "words of one column": lambda t: words_program(f64, u64, t),
    "words of f8": lambda t: words_program(f8e4m3, u16, t),
    "heads of slices": lambda t: heads_program(f16, u64, t),
    "runs": lambda t: runs_program(f16),
    "histogram of few bins": lambda t: histogram_program(f32, 256, t, False),
    "histogram of bytes": lambda t: histogram_program(u8, 256, t, True),
    "histogram of many bins": lambda t: histogram_program(f32, 65536 if t.max_shared > 200_000 else 40_000, t, False),
    "histogram of too many bins": lambda t: histogram_program(u32, 1 << 20, t, True),
    "reduce": lambda t: reduce_program(f32, Monoid(f32, "add"), f32, t),
    "reduce in order": lambda t: reduce_program(f32, LAST, f32, t),
    "transpose": lambda t: transpose_program(f32, True, True),
    "transpose of bytes": lambda t: transpose_program(u8, False, True),
    "sort": lambda t: sort_program(SortPlan(u8), t),
    "sort of f8": lambda t: sort_program(SortPlan(f8e5m2), t),
    "sort of pairs": lambda t: sort_program(SortPlan(f16, f64, descending=True, wide=True), t),
    "sort of rows": lambda t: rows_program(SortPlan(f16, i64, places=True), row_shape(SortPlan(f16), 100, t)),
}


@pytest.mark.requires("ptxas")
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_assembles(name: str, target: str) -> None:
    chosen = parse_target(target)
    artifact = build_artifact(finished_program(PROGRAMS[name](chosen), chosen), chosen, entry=False)
    assemble(artifact.code.decode(), target, level=0)
    assert all(launch.shared_bytes <= chosen.max_shared and launch.threads <= chosen.max_threads for launch in artifact.launches)


def test_tables_of_histograms_fit_the_target() -> None:
    new, old = parse_target("sm_90a"), parse_target("sm_75")
    assert [histogram_table(f32, bins, new).kind for bins in (256, 5000, 65_536, 200_000)] == ["warp", "block", "half", "none"]
    assert [histogram_table(u8, bins, old).kind for bins in (256, 65_536)] == ["lane", "none"]
