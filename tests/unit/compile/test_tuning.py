"""Tuning tables: what is kept, what survives damage, and what is advised for a call."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tilewright.base.target import parse_target
from tilewright.cli.guess import parse_arguments
from tilewright.cli.sources import read_source, walk
from tilewright.compile import driver, tuning
from tilewright.compile.driver import Signature
from tilewright.compile.tuning import Extents, Measurement, TuningStore, TuningTable, advise, distance
from tilewright.passes.schedules.attention import MmaAttention
from tilewright.passes.schedules.matrix import Wgmma

MATMUL = str(Path(__file__).parents[3] / "examples/matmul.py")
ATTENTION = str(Path(__file__).parents[2] / "kernels_attention.py")
KEY = "ab" * 32
WIDE = Wgmma(128, 256, 64, stages=4, math_warpgroups=2)
TURNS = Wgmma(128, 128, 64, stages=6, math_warpgroups=2, pingpong=True, mma_in_flight=1)
SMALL = Wgmma(64, 128, 64, stages=8, math_warpgroups=2, pingpong=True, mma_in_flight=1)
LISTED = (WIDE, TURNS, SMALL)
TEXTS = tuple(s.describe() for s in LISTED)


def square(n: int) -> Extents:
    return (("a", 0, n), ("a", 1, n), ("b", 0, n), ("b", 1, n))


def measured(n: int, schedule: str, seconds: float, **more: object) -> Measurement:
    return replace(Measurement(square(n), schedule, seconds, version="1", date="2026-01-01T00:00:00Z"), **more)  # type: ignore[arg-type]


def table(*entries: Measurement) -> TuningTable:
    return TuningTable("matmul", "sm_90a", entries)


def ask(found: TuningTable, n: int, version: str = "1", divisors: Extents = ()) -> str:
    return advise(found, square(n), divisors, lambda extents: LISTED, version)


# -- on disk --------------------------------------------------------------------------------------------------------


def test_a_table_is_found_again_by_another_process(tmp_path: Path) -> None:
    entries = [measured(64, TEXTS[0], 1e-3, divisors=square(16), rounds=5), measured(64, TEXTS[1], 0.0, error="wrong")]
    TuningStore(tmp_path).add(KEY, "matmul", "sm_90a", entries)
    found = TuningStore(tmp_path).get(KEY)
    assert found == TuningTable("matmul", "sm_90a", tuple(entries))
    assert found is not None and found.entries[0].divisors == square(16) and found.entries[0].rounds == 5
    path = TuningStore(tmp_path).path(KEY)
    assert path is not None and path.stat().st_mode & 0o077 == 0 and path.parent.stat().st_mode & 0o077 == 0
    assert [p.name for p in path.parent.iterdir()] == [f"{KEY}.json"]


OLD_TEXT = "family=wgmma m=128 n=128 k=64 stages=6 groups=2 turns=1 wait=1"
"""The second of those listed, as an earlier version wrote it."""


def test_tables_of_an_earlier_version_are_read_and_written_in_new_words(tmp_path: Path) -> None:
    store = TuningStore(tmp_path)
    store.add(KEY, "matmul", "sm_90a", [measured(64, TEXTS[1], 1e-3), measured(64, "no schedule", 2e-3)])
    path = store.path(KEY)
    assert path is not None
    body = path.read_text(encoding="utf-8").partition("\n")[2].removesuffix("\n").replace(TEXTS[1], OLD_TEXT)
    assert "turns=1" in body and "pingpong" not in body
    path.write_text(f"{hashlib.sha256(f'{KEY}{chr(0)}{body}'.encode()).hexdigest()}\n{body}\n", encoding="utf-8")
    found = TuningStore(tmp_path).get(KEY)
    assert found is not None and [m.schedule for m in found.entries] == [TEXTS[1], "no schedule"]
    assert ask(found, 64) == TEXTS[1]
    TuningStore(tmp_path).add(KEY, "matmul", "sm_90a", [measured(64, TEXTS[1], 3e-3), measured(64, TEXTS[0], 4e-3)])
    written = path.read_text(encoding="utf-8")
    assert "turns=1" not in written and written.count("pingpong=1") == 1 and TEXTS[0] in written


def test_processes_add_to_each_others_tables_and_the_newest_counts(tmp_path: Path) -> None:
    one, other = TuningStore(tmp_path), TuningStore(tmp_path)
    one.add(KEY, "matmul", "sm_90a", [measured(64, TEXTS[0], 1.0)])
    other.add(KEY, "matmul", "sm_90a", [measured(64, TEXTS[1], 2.0)])
    one.add(KEY, "matmul", "sm_90a", [measured(64, TEXTS[0], 3.0)])
    found = TuningStore(tmp_path).get(KEY)
    assert found is not None
    assert {m.schedule: m.seconds for m in found.entries} == {TEXTS[0]: 3.0, TEXTS[1]: 2.0}
    one.remove(KEY, square(64), TEXTS[0])
    again = TuningStore(tmp_path).get(KEY)
    assert again is not None and [m.schedule for m in again.entries] == [TEXTS[1]]


@pytest.mark.parametrize("damage", ["cut", "bit", "other key", "empty", "binary"])
def test_damaged_files_are_ignored_and_written_anew(tmp_path: Path, damage: str) -> None:
    store = TuningStore(tmp_path)
    store.add(KEY, "matmul", "sm_90a", [measured(64, TEXTS[0], 1.0)])
    path = store.path(KEY)
    assert path is not None
    text = path.read_bytes()
    if damage == "other key":
        path = path.with_name("cd" * 32 + ".json")
    path.write_bytes({"cut": text[:-40], "bit": text.replace(b"1.0", b"0.1"), "other key": text, "empty": b"", "binary": b"\xff\xfe\x00"}[damage])
    assert TuningStore(tmp_path).get(path.stem) is None
    TuningStore(tmp_path).add(path.stem, "matmul", "sm_90a", [measured(64, TEXTS[1], 2.0)])
    found = TuningStore(tmp_path).get(path.stem)
    assert found is not None and [m.schedule for m in found.entries] == [TEXTS[1]]


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no owners here")
def test_a_directory_others_can_write_is_not_believed(tmp_path: Path) -> None:
    TuningStore(tmp_path).add(KEY, "matmul", "sm_90a", [measured(64, TEXTS[0], 1.0)])
    (tmp_path / "tuning").chmod(0o777)
    assert TuningStore(tmp_path).get(KEY) is None


def test_without_a_disk_tables_live_in_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE", "0")
    store = TuningStore()
    assert store.path(KEY) is None and store.get(KEY) is None
    store.add(KEY, "matmul", "sm_90a", [measured(64, TEXTS[0], 1.0)])
    found = store.get(KEY)
    assert found is not None and len(found.entries) == 1


# -- advice ---------------------------------------------------------------------------------------------------------


def test_measured_extents_take_the_fastest() -> None:
    assert ask(table(measured(64, TEXTS[0], 3.0), measured(64, TEXTS[1], 2.0), measured(64, TEXTS[2], 2.5)), 64) == TEXTS[1]


def test_thorough_measurements_count_before_lucky_ones() -> None:
    found = table(measured(64, TEXTS[0], 3.0, rounds=5), measured(64, TEXTS[1], 2.9, rounds=5), measured(64, TEXTS[2], 2.0))
    assert ask(found, 64) == TEXTS[1]
    # Elsewhere too: the lucky one is taken for no better than the thorough ones.
    assert ask(found, 72) == TEXTS[1]


def test_nothing_measured_means_no_advice() -> None:
    assert ask(table(), 64) == ""
    assert ask(table(measured(64, TEXTS[1], 0.0, error="wrong")), 64) == ""


def test_failures_are_never_advised() -> None:
    found = table(measured(64, TEXTS[0], 3.0), measured(64, TEXTS[1], 1.0), measured(128, TEXTS[1], 0.0, error="wrong"))
    assert ask(found, 64) == TEXTS[0]
    assert ask(found, 128) == TEXTS[0]


def test_near_shapes_decide_for_unseen_sizes_and_far_ones_do_not() -> None:
    found = table(measured(4096, TEXTS[0], 1.10), measured(4096, TEXTS[1], 1.00), measured(4096, TEXTS[2], 1.30))
    assert ask(found, 4608) == TEXTS[1]
    assert ask(found, 64) == TEXTS[0]
    both = table(*found.entries, measured(512, TEXTS[0], 1.3), measured(512, TEXTS[1], 1.2), measured(512, TEXTS[2], 1.0))
    assert ask(both, 640) == TEXTS[2]
    assert ask(both, 4000) == TEXTS[1]


def test_a_call_without_extents_takes_what_was_fastest_overall() -> None:
    found = table(measured(512, TEXTS[0], 1.3), measured(512, TEXTS[2], 1.0), measured(1024, TEXTS[0], 1.2), measured(1024, TEXTS[2], 1.0))
    assert advise(found, (), (), lambda extents: LISTED, "1") == TEXTS[2]
    # The model's first choice without sizes was not measured at all: that is no reason to take it.
    without = Wgmma(192, 192, 64, stages=4, math_warpgroups=3, epilogue_stages=1)
    assert advise(found, (), (), lambda extents: LISTED if extents else (without, *LISTED), "1") == TEXTS[2]


def test_neighbours_the_model_does_not_list_serve_other_sizes_where_their_code_exists() -> None:
    variant = replace(TURNS, stages=5, raster=4).describe()
    promised: Extents = (("a", 1, 64), ("b", 1, 64))
    found = table(measured(4096, TEXTS[0], 1.2), measured(4096, variant, 1.0, divisors=promised))
    assert ask(found, 4608, divisors=promised) == variant
    assert ask(found, 4608, divisors=(("a", 1, 64), ("b", 1, 8))) == TEXTS[0]
    other_way = replace(TURNS, a_copy="threads").describe()
    found = table(measured(4096, TEXTS[0], 1.2), measured(4096, other_way, 1.0))
    assert ask(found, 4608) == TEXTS[0]


def test_another_compilers_measurements_count_for_schedules_this_one_lists() -> None:
    variant = replace(TURNS, stages=5).describe()
    found = table(measured(64, variant, 1.0), measured(64, TEXTS[1], 2.0), measured(64, TEXTS[0], 3.0))
    assert ask(found, 64, version="1") == variant
    assert ask(found, 64, version="2") == TEXTS[1]
    unreadable = table(measured(4096, "family=of m=1", 1.0), measured(4096, TEXTS[0], 2.0))
    assert ask(unreadable, 4608) == TEXTS[0]


def test_distance_is_in_doublings() -> None:
    assert distance(square(64), square(64)) == 0
    assert distance(square(64), square(128)) == pytest.approx(1)
    assert distance(square(64), (("a", 0, 256), *square(64)[1:])) == pytest.approx(1)


def test_attention_is_advised_for_rows_of_its_own_length_only() -> None:
    """The terms of a score are part of the code: what was measured for others does not fit."""
    here, there = (("q", 0, 512), ("q", 1, 64)), (("q", 0, 512), ("q", 1, 128))
    own = MmaAttention(64, 64, 64, stages=2, warps_m=4, head_dim_v=64)
    other = MmaAttention(64, 32, 128, stages=2, warps_m=4, head_dim_v=128)
    table = TuningTable("k", "sm_80", (Measurement(there, other.describe(), 1.0, version="v"),))
    assert advise(table, here, (), lambda extents: (own,), "v") == own.describe()
    near = replace(own, n=32)
    table = table.with_entries([
        Measurement((("q", 0, 480), ("q", 1, 64)), text.describe(), seconds, version="v") for text, seconds in ((own, 2.0), (near, 1.0))
    ])
    assert advise(table, here, (), lambda extents: (own,), "v") == near.describe()


# -- the hook -------------------------------------------------------------------------------------------------------


def test_compiling_asks_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILEWRIGHT_TUNING", raising=False)
    tuning.use_store(TuningStore(tmp_path))
    try:
        target = parse_target("sm_90a")
        arguments = parse_arguments("a=bf16[4096,4096] b=bf16[4096,4096]")
        (entry,) = walk(read_source(MATMUL), arguments).raise_if_errors().entries
        signature: Signature = entry.signature(gpu=True)

        def chosen(wanted: Signature) -> str:
            (schedule,) = driver.compile_stages(entry.function, wanted, target).stages.schedules
            return schedule.describe()

        ranked = driver.contraction_schedules(entry.function, signature, target, signature.extents)
        assert len(ranked) > 1
        assert chosen(signature) == ranked[0].describe()
        key = tuning.kernel_key(entry.function, signature.args, signature.precision, target)
        version = driver.compiler_version()
        best = ranked[-1].describe()
        times = {s.describe(): 2.0 for s in ranked} | {best: 1.0}
        tuning.store().add(
            key, "matmul", target.name, [Measurement(signature.extents, text, t, version=version) for text, t in times.items()]
        )
        assert chosen(signature) == best
        # Another size of the same kernel, and what the user fixed.
        near = tuple((array, axis, 4608) for array, axis, _ in signature.extents)
        assert chosen(replace(signature, extents=near)) == best
        assert chosen(replace(signature, schedule=ranked[0].describe())) == ranked[0].describe()
        monkeypatch.setenv("TILEWRIGHT_TUNING", "off")
        assert chosen(signature) == ranked[0].describe()
    finally:
        tuning.use_store(None)


@pytest.mark.parametrize("name", ["sm_80", "sm_90a"])
def test_attention_has_schedules_and_asks_the_table(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILEWRIGHT_TUNING", raising=False)
    tuning.use_store(TuningStore(tmp_path))
    try:
        target = parse_target(name)
        arguments = parse_arguments("q=bf16[1,8,512,64] k=bf16[1,8,512,64] v=bf16[1,8,512,64]")
        entries = walk(read_source(ATTENTION), arguments).raise_if_errors().entries
        (entry,) = (e for e in entries if e.name == "plain")
        signature: Signature = entry.signature(gpu=True)

        def chosen(wanted: Signature) -> str:
            (schedule,) = driver.compile_stages(entry.function, wanted, target).stages.schedules
            return schedule.describe()

        ranked = driver.contraction_schedules(entry.function, signature, target, signature.extents)
        assert len(ranked) > 1 and chosen(signature) == ranked[0].describe()
        key = tuning.kernel_key(entry.function, signature.args, signature.precision, target)
        version = driver.compiler_version()
        best = ranked[1].describe()
        times = {s.describe(): 2.0 for s in ranked} | {best: 1.0}
        new = [Measurement(signature.extents, text, t, version=version) for text, t in times.items()]
        tuning.store().add(key, "plain", target.name, new)
        assert chosen(signature) == best
        # Rows of another length: nothing measured fits them.
        longer = tuple((array, axis, 128 if axis == 3 else extent) for array, axis, extent in signature.extents)
        other = chosen(replace(signature, extents=longer))
        assert other not in times and "head_dim_v=128" in other
    finally:
        tuning.use_store(None)


def test_looking_up_nothing_is_one_look_at_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = TuningStore(tmp_path)
    looked: list[Path] = []
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda self: looked.append(self) or exists(self))
    assert [store.get(KEY) for _ in range(5)] == [None] * 5
    assert looked == [tmp_path / "tuning" / f"{KEY}.json"]
