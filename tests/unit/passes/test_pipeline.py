"""The orders of passes as data: every pass is reached, blamed, timed and dumped; lowerings are chosen by rule; the table in the tour is current."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest
from tools import pass_table

import pass_cases
from pass_cases import OTHER, PATHS
from tilewright.base.errors import CompilerBug, UserError
from tilewright.base.source import NOWHERE
from tilewright.base.target import parse_target
from tilewright.compile import driver
from tilewright.ir.text_parse import parse_kernel, parse_program
from tilewright.passes import pipeline, routes
from tilewright.passes.pipeline import ORDERS, TITLES, TO_THREAD, TO_TILE, all_passes, to_thread_pass, to_tile_pass
from tilewright.passes.runner import Pass, PassContext, Selection, Step
from tilewright.passes.schedules.loops import Schedule
from tilewright.passes.schedules.text import parse_schedule

PAD_WINDOWS = next(number for number, step in enumerate(ORDERS["program"]) if step.run is pipeline.PAD_WINDOWS)
"""Where the pass stands that takes a program, plans and a target."""
SHARE_SCATTERS = next(number for number, step in enumerate(ORDERS["tile"]) if step.run is pipeline.SHARE_SCATTERS)
"""Where one stands that takes a kernel of tiles."""

ROOT = Path(__file__).parents[3]
PLACES = [(order, number, one) for order, steps in ORDERS.items() for number, step in enumerate(steps) for one in step.passes]


def label(value: object) -> str:
    return value.name if isinstance(value, Pass) else str(value)


def planted(order: str, number: int, one: Pass, function: Callable[..., object]) -> dict[str, tuple[Step, ...]]:
    """The orders with another function in place of that of one pass at one place."""
    steps = list(ORDERS[order])
    other = replace(one, function=function)
    run = steps[number].run
    if isinstance(run, Selection):
        choose = run.choose
        steps[number] = replace(
            steps[number],
            run=replace(run, choose=lambda s, t: other if choose(s, t) is one else choose(s, t)),
        )
    else:
        steps[number] = replace(steps[number], run=other)
    return {**ORDERS, order: tuple(steps)}


def reach(order: str, one: Pass) -> object:
    return OTHER.get((order, one.name), PATHS[order])()


@pytest.fixture(autouse=True)
def nothing_cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(driver, "compiler_version", lambda: str(tmp_path))


# -- blame ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("order", "number", "one"), PLACES, ids=label)
def test_a_failure_in_any_pass_names_the_pass_and_a_file(order: str, number: int, one: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> object:
        raise ValueError("planted")

    monkeypatch.setattr(routes, "ORDERS", planted(order, number, one, fail))
    with pytest.raises(CompilerBug) as caught:
        reach(order, one)
    assert caught.value.code == "TW040"
    kind = "typed tree" if one.source == "tree" else "graph of blocks" if one.source == "blocks" else "kernel" if one.is_of_kernels else "program"
    found = re.search(rf"pass {one.name} failed on {kind} \S+: ValueError: planted(?s:.*)the {kind} is in (\S+)", str(caught.value))
    assert found, str(caught.value)
    path = Path(found[1])
    text = path.read_text(encoding="utf-8")
    path.unlink()
    if kind == "kernel":
        assert one.source in ("any", parse_kernel(text).stage.value)
    elif kind == "program":
        assert parse_program(text).calls
    else:
        assert text


@pytest.mark.parametrize(
    ("order", "number", "returned", "reason"),
    [
        ("loop", 0, lambda kernel: None, "TypeError: it returns NoneType, not a kernel"),
        ("loop", 0, lambda kernel: replace(kernel, params=()), "TW042"),
        ("tile", SHARE_SCATTERS, lambda kernel, *rest: replace(kernel, stage=kernel.stage.THREAD), "ValueError: it returns a kernel of stage thread, not tile"),
        ("program", PAD_WINDOWS, lambda program, *rest: (None, ()), "TypeError: it returns NoneType, not a program"),
        ("program", PAD_WINDOWS, lambda program, plans, target: (replace(program, outputs=()), plans), "TW042"),
    ],
)  # fmt: skip
def test_a_result_that_is_wrong_is_blamed_too(
    order: str, number: int, returned: Callable[..., object], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (one,) = ORDERS[order][number].passes
    monkeypatch.setattr(routes, "ORDERS", planted(order, number, one, returned))
    with pytest.raises(CompilerBug) as caught:
        reach(order, one)
    assert f"pass {one.name} failed" in str(caught.value)
    assert reason in str(caught.value)


def test_a_kernel_of_another_stage_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "ORDERS", {**ORDERS, "loop": (Step(pipeline.ASSIGN_LAYOUTS, ""),)})
    with pytest.raises(CompilerBug, match="pass assign_layouts failed on kernel scale: it takes stage tile, the kernel is of stage loop"):
        PATHS["loop"]()


def test_errors_of_users_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> object:
        raise UserError.at("TW005", "not so", NOWHERE)

    monkeypatch.setattr(routes, "ORDERS", planted("loop", 0, pipeline.SIMPLIFY, refuse))
    with pytest.raises(UserError, match="not so"):
        PATHS["loop"]()


# -- dump and times ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
def test_every_pass_is_dumped(order: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "dump"
    monkeypatch.setenv("TILEWRIGHT_DUMP", str(folder))
    PATHS[order]()
    files = sorted(folder.iterdir())
    dumped = [re.fullmatch(r"\d+-(\w+)\.kir", file.name)[1] for file in files]  # type: ignore[index]
    wanted = [step.run.name for step in ORDERS[order] if isinstance(step.run, Pass) and step.only in (None, pipeline.UNPLANNED, *([] if order == "thread" else [pipeline.ON_CPU]))]
    rest = iter(dumped)
    assert all(name in rest for name in wanted), f"{wanted} in this order in {dumped}"
    for text in (file.read_text(encoding="utf-8") for file in files):
        assert text.startswith(("program @", "kernel @"))
        if len(text) < 4000:
            assert parse_program(text) if text.startswith("program") else parse_kernel(text)


def test_every_pass_is_timed() -> None:
    times = PATHS["thread"]().trace.times  # type: ignore[attr-defined]
    ran = [step.run for order in ("loop", "plan", "program", "tile", "thread") for step in ORDERS[order] if step.only not in (pipeline.WITH_WINDOWS, pipeline.CHOSEN_CPU, pipeline.WITH_FLAT_ROWS, pipeline.WITH_UNITS, pipeline.WITH_WORDS, pipeline.UNPACKING, pipeline.BRINGS_PACKED, pipeline.WITH_SEVERAL, pipeline.WITH_FETCH, pipeline.WITH_PARTS, pipeline.UNPLANNED_CPU, pipeline.ON_CPU)]
    assert {one.name for one in ran if isinstance(one, Pass)} <= times.keys()
    assert all(seconds >= 0 for seconds in times.values())


# -- the data ---------------------------------------------------------------------------------------------------------


def parameters(function: Callable[..., object]) -> Iterator[inspect.Parameter]:
    yield from inspect.signature(function).parameters.values()


@pytest.mark.parametrize("one", tuple(all_passes()), ids=label)
def test_what_a_pass_takes_is_what_its_function_takes(one: Pass) -> None:
    known = {field.name for field in fields(PassContext)}  # type: ignore[arg-type]
    assert {*one.takes, *filter(None, [one.gives])} <= known
    wanted = list(parameters(getattr(one.function, "loaded", one.function)))
    needed = [p for p in wanted if p.default is inspect.Parameter.empty]
    assert len(needed) <= 1 + len(one.takes) <= len(wanted)
    assert one.what.endswith(".")


def test_names_are_unique_and_orders_have_titles() -> None:
    names = [one.name for one in all_passes()]
    assert len(set(names)) == len(names)
    assert ORDERS.keys() == TITLES.keys() == PATHS.keys()
    assert all(step.why.endswith(".") for steps in ORDERS.values() for step in steps)


@pytest.mark.parametrize(
    ("schedule", "target", "tile", "thread"),
    [
        (Schedule((1, 1024), vector=4, threads=128), "sm_90a", "lower_loops", "lower_tiles"),
        (Schedule((1, 1024), vector=4, threads=128, window=True), "sm_90a", "lower_loops", "lower_windows"),
        (Schedule((1, 64, 1, 128), vector=8, vector_index=1, threads=256, turned="vectors"), "sm_90a", "lower_loops", "lower_turned"),
        ("family=wgmma m=64 n=64 k=64", "sm_90a", "lower_contraction", "lower_wgmma"),
        ("family=mma m=64 n=64 k=64", "sm_80", "lower_contraction", "lower_mma"),
        ("family=fma m=64 n=64 k=8", "sm_80", "lower_contraction", "lower_mma"),
        ("family=gemv m=1 n=4 k=256", "sm_90a", "lower_gemv", "lower_row_dots"),
        ("family=attention m=64 n=64 k=64", "sm_90a", "lower_attention", "lower_wgmma_attention"),
        ("family=attention_mma m=64 n=64 k=64", "sm_80", "lower_attention", "lower_mma_attention"),
        ("family=cpu m=64 n=64 k=64", "x86-64-avx512", "lower_contraction_cpu", "lower_tiles"),
        ("family=cpu m=64 n=64 k=64 beside=2", "x86-64-avx512", "lower_products_cpu", "lower_tiles"),
        ("family=cpu m=64 n=64 k=64 half=1", "x86-64-avx512", "lower_symmetric_cpu", "lower_tiles"),
        ("family=amx m=64 n=64 k=64", "x86-64-amx", "lower_contraction_amx", "lower_tiles"),
        ("family=cpu_attention m=64 n=64 k=64", "x86-64-avx512", "lower_attention_cpu", "lower_tiles"),
    ],
)  # fmt: skip
def test_schedules_choose_lowerings(schedule: str | Schedule, target: str, tile: str, thread: str) -> None:
    chosen = parse_schedule(schedule) if isinstance(schedule, str) else schedule
    assert to_tile_pass(chosen, parse_target(target)).name == tile
    assert to_thread_pass(chosen, parse_target(target)).name == thread


def test_every_rule_has_a_lowering_of_its_own() -> None:
    lowerings = [rule.lowering.name for rule in (*TO_TILE, *TO_THREAD)]
    assert len(set(lowerings)) == len(lowerings)


def test_every_compilation_serves_a_place() -> None:
    places = {(order, one.name) for order, _, one in PLACES}
    assert OTHER.keys() <= places
    assert pass_cases.PATHS.keys() == ORDERS.keys()


def test_the_tables_of_the_tour_are_current() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert pass_table.written(text) == text, "python tools/pass_table.py --write"
