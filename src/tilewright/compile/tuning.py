"""Tuning tables on disk: how long schedules of a contraction took, and which one a call should use.

One file per kernel (its tree, its arguments without extents, its precision, its target) lies in `tuning` beside the compiled kernels: the
SHA-256 of the rest on its first line, then JSON. It appears whole or not at all, is closed to others, and is ignored when damaged. Without
a place on disk tables live in this process only. `TILEWRIGHT_TUNING=off` ignores them.

`advise` answers for one call. Where its very extents were measured, the fastest schedule of those measured most thoroughly wins. Else the
ranking of the cost model is corrected by what was measured nearby. With M(s, x) = STEP · (place of s in the model's ranking for extents
x) and, for each measured shape p, r(s, p) = log2(seconds of s at p / seconds of b at p) − (M(s, p) − M(b, p)), where b is the schedule
measured there that the model ranks first (so r says how much slower s is beside b than the model thinks), the schedule with the smallest

    M(s, e) + Σ w(p) · r(s, p) / (PRIOR + Σ w(p)),    w(p) = 4^−d(e, p),    d² = mean over axes of log2(e/p)²

is taken; the sums run over the nearest shapes where s was measured. So one table serves sizes nobody measured: near a measured shape its
ratios decide, far from all of them the model does. Code for a CPU is made for all sizes at once: then every shape has the same weight,
and M and PRIOR are 0. The model's first choice stays unless another is clearly faster. A schedule that failed anywhere is never
advised. Schedules the model does not list (neighbours the tuner tried) take part where the code they need exists for the call too: they move
data as a listed one does, and what divided the extents when they were measured divides them now. Measurements of another version of the
compiler count only for schedules that this one still lists.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.base.errors import UserError
from tilewright.base.forks import fork_safe_lock
from tilewright.base.private_files import TEMPORARY, PrivateFolder, UnsafeFile, say_once
from tilewright.base.record import record
from tilewright.base.target import Target
from tilewright.compile.directory_lock import directory_lock
from tilewright.compile.tuning_folder import enabled, folder, opened
from tilewright.tree.syntax import Function
from tilewright.tree.typed import ArgSpec

if TYPE_CHECKING:
    from tilewright.passes.schedules.matrix import MatrixSchedule

Extents = tuple[tuple[str, int, int], ...]
"""(array, axis, extent) triples."""
Ranking = Callable[[Extents], "tuple[MatrixSchedule, ...]"]
"""The cost model's candidates for these extents, best first."""

STEP = math.log2(1.02)
"""What one place in the model's ranking is taken to cost."""
PRIOR = 0.25
"""How much the model counts: as a shape measured one doubling away."""
CLEARLY = 0.995
"""The model's first choice stays unless another one is this much faster."""
NEAREST = 8
"""Shapes looked at."""
NEAR = 2.0
"""How many doublings away what was measured still speaks for candidates without a cost model."""
LOOPS = "family=loops"
"""What schedules of loop nests begin with; alone it is the compiler's own choice."""
_FORMAT = 1
_SUFFIX = ".json"
_STALE_SECONDS = 3600


@record
class Measurement:
    """One schedule at one shape: its time, or why it has none."""

    extents: Extents
    schedule: str
    seconds: float = 0.0
    error: str = ""
    date: str = ""
    version: str = ""
    """Of the compiler."""
    divisors: Extents = ()
    """What the code promised of the extents."""
    rounds: int = 1
    """How often it was measured. One quick measurement may be lucky: where some schedules were measured more often, they are compared."""

    def __repr__(self) -> str:
        return f"<{self.schedule}: {self.error or f'{self.seconds * 1e6:.1f} µs'}>"

    @property
    def ok(self) -> bool:
        return not self.error


@record
class TuningTable:
    """All that was measured of one kernel."""

    kernel: str
    target: str
    entries: tuple[Measurement, ...] = ()

    def __repr__(self) -> str:
        return f"<tuning table of {self.kernel} for {self.target}: {len(self.entries)} measurements>"

    def with_entries(self, new: Iterable[Measurement]) -> TuningTable:
        """The table with these added; the newest measurement of a schedule at a shape stays."""
        found = {(m.extents, m.schedule): m for m in self.entries}
        for m in new:
            found[m.extents, m.schedule] = m
        return replace(self, entries=tuple(found.values()))

    def at(self, extents: Extents) -> tuple[Measurement, ...]:
        """What was measured at these extents: those measured most often first, among them the fastest; failures last."""
        return in_order(m for m in self.entries if m.extents == extents)


def in_order(measurements: Iterable[Measurement]) -> tuple[Measurement, ...]:
    """Those measured most often first, among them the fastest; failures last."""
    return tuple(sorted(measurements, key=lambda m: (not m.ok, -m.rounds, m.seconds)))


def kernel_key(function: Function, args: tuple[ArgSpec, ...], precision: str, target: Target) -> str:
    """The identity of a kernel in the tables: all that its code is made for but the sizes."""
    parts = (repr(function), repr(args), precision, target.key())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


# -- advice ---------------------------------------------------------------------------------------------------------


def advise(table: TuningTable, extents: Extents, divisors: Extents, ranking: Ranking, version: str) -> str:
    """The schedule to use for a call with these extents; empty when the table has nothing to say about it."""
    ranked = ranking(extents)
    if not ranked:
        return ""
    table = replace(table, entries=tuple(m for m in table.entries if not m.schedule.startswith(LOOPS)))
    listed = {s.describe() for s in ranked}
    entries = [m for m in table.entries if m.version == version or m.schedule in listed]
    bad = {m.schedule for m in entries if not m.ok}
    good = [m for m in entries if m.ok and m.seconds > 0 and m.schedule not in bad]
    first = ranked[0].describe()
    here = in_order(m for m in good if m.extents == extents)
    if here:
        usual = next((m for m in here if m.schedule == first and m.rounds == here[0].rounds), None)
        return first if usual is not None and usual.seconds * CLEARLY <= here[0].seconds else here[0].schedule
    if not good:
        return ""
    candidates = {s.describe(): s for s in ranked if s.describe() not in bad}
    for m in good:
        schedule = _parsed(m.schedule)
        if schedule is not None and _holds(m.divisors, divisors) and any(schedule.data_path == s.data_path for s in ranked):
            candidates.setdefault(m.schedule, schedule)
    shapes = _shapes(good, extents, ranking)
    if not extents:
        # Code for all sizes at once: what was measured, and nothing else, says how schedules compare.
        candidates = {text: s for text, s in candidates.items() if any(text in shape.seconds for shape in shapes)}
    estimates = {text: _estimate(s, text, ranked if extents else (), shapes) for text, s in candidates.items()}
    best = min(estimates, key=lambda text: estimates[text], default="")
    return first if first in estimates and estimates[first] + math.log2(CLEARLY) <= estimates[best] else best


def advise_loops(table: TuningTable, extents: Extents, version: str) -> str:
    """The schedule of loops for a call with these extents: the fastest where it, or one at most NEAR doublings away, was measured by this compiler; empty for the compiler's own choice."""
    own = [m for m in table.entries if m.schedule.startswith(LOOPS) and m.version == version]
    bad = {m.schedule for m in own if not m.ok}
    found = advise_listed(replace(table, entries=tuple(own)), extents, [LOOPS, *(m.schedule for m in own if m.schedule not in (LOOPS, *bad))])
    return "" if found == LOOPS else found


def advise_listed(table: TuningTable, extents: Extents, listed: Sequence[str]) -> str:
    """Of candidates without a cost model, first the one that is usual: the fastest at these extents, else at the nearest that were measured and
    are at most NEAR doublings away; empty when there are none."""
    good = [m for m in table.entries if m.ok and m.seconds > 0 and m.schedule in listed]
    nearest = min((m.extents for m in good), key=lambda p: distance(extents, p), default=None)
    if nearest is None or distance(extents, nearest) > NEAR:
        return ""
    here = in_order(m for m in good if m.extents == nearest)
    usual = next((m for m in here if m.schedule == listed[0] and m.rounds == here[0].rounds), None)
    return listed[0] if usual is not None and usual.seconds * CLEARLY <= here[0].seconds else here[0].schedule


@record
class _Shape:
    """A measured shape: how much it counts, the model's ranking there, seconds by schedule, and the schedule all are compared with."""

    weight: float
    ranked: tuple[MatrixSchedule, ...]
    seconds: Mapping[str, float]
    base: str
    base_place: int


def _shapes(good: list[Measurement], extents: Extents, ranking: Ranking) -> list[_Shape]:
    at: dict[Extents, list[Measurement]] = {}
    for m in good:
        at.setdefault(m.extents, []).append(m)
    nearest = sorted(at, key=lambda p: distance(extents, p))[:NEAREST]
    return [_shape(4.0 ** -distance(extents, p), ranking(p), _sober(at[p])) for p in nearest]


def _shape(weight: float, ranked: tuple[MatrixSchedule, ...], seconds: dict[str, float]) -> _Shape:
    places = {text: len(ranked) if s is None else _place(s, ranked) for text, s in ((text, _parsed(text)) for text in seconds)}
    base = min(places, key=lambda text: places[text])
    return _Shape(weight, ranked, seconds, base, places[base])


def _sober(measured: list[Measurement]) -> dict[str, float]:
    """Seconds by schedule. The luckiest of many short measurements looks better than it is: none counts as less than the median of the
    thorough ones, which were chosen as the best."""
    most = max(m.rounds for m in measured)
    thorough = sorted(m.seconds for m in measured if m.rounds == most)
    least = thorough[len(thorough) // 2]
    return {m.schedule: m.seconds if m.rounds == most else max(m.seconds, least) for m in measured}


def distance(a: Extents, b: Extents) -> float:
    """How many doublings apart two shapes are, on average; 0 where one of them is not known."""
    other = {(array, axis): extent for array, axis, extent in b}
    steps = [math.log2(max(1, e) / max(1, other[n, x])) for n, x, e in a if (n, x) in other]
    return math.sqrt(sum(s * s for s in steps) / len(steps)) if steps else 0.0


def _estimate(schedule: MatrixSchedule, text: str, ranked: tuple[MatrixSchedule, ...], shapes: list[_Shape]) -> float:
    """log2 of the expected time, up to a constant; by measurements alone where no ranking is given."""
    correction = weights = 0.0
    for shape in shapes:
        if text in shape.seconds:
            ratio = math.log2(shape.seconds[text] / shape.seconds[shape.base])
            expected = STEP * (_place(schedule, shape.ranked) - shape.base_place) if ranked else 0.0
            correction += shape.weight * (ratio - expected)
            weights += shape.weight
    if not ranked:
        return correction / weights
    return STEP * _place(schedule, ranked) + correction / (PRIOR + weights)


def _place(schedule: MatrixSchedule, ranked: tuple[MatrixSchedule, ...]) -> int:
    """Where the model ranks a schedule; one it does not list, as the first with its tile, or last."""
    if schedule in ranked:
        return ranked.index(schedule)
    return next((place for place, s in enumerate(ranked) if s.tile_kind == schedule.tile_kind), len(ranked))


def _holds(promised: Extents, now: Extents) -> bool:
    known = {(array, axis): divisor for array, axis, divisor in now}
    return all(known.get((array, axis), 1) % divisor == 0 for array, axis, divisor in promised)


def _parsed(text: str) -> MatrixSchedule | None:
    from tilewright.passes.schedules.text import parse_schedule

    try:
        return parse_schedule(text)
    except UserError:
        return None


# -- on disk --------------------------------------------------------------------------------------------------------


class TuningStore:
    """A directory of tables. No method fails because of the disk: what cannot be kept there is kept in memory."""

    def __init__(self, root: Path | None = None) -> None:
        self._known: dict[str, TuningTable | None] = {}
        self._lock = fork_safe_lock()
        self.directory = folder(root)
        opened()

    def path(self, key: str) -> Path | None:
        """Where the table of a kernel is kept; None when it is not kept on disk."""
        return None if self.directory is None else self.directory / (key + _SUFFIX)

    def get(self, key: str) -> TuningTable | None:
        """The table of a kernel; the disk is asked once."""
        if key not in self._known:
            self._known[key] = self._read(key)
        return self._known[key]

    def is_used(self) -> bool:
        """Whether there may be tables: in this process, or on disk."""
        return any(self._known.values()) or (self.directory is not None and self.directory.is_dir())

    def tables(self) -> dict[str, TuningTable]:
        """All tables, by their keys: those on disk, and those of this process."""
        on_disk = sorted(self.directory.glob(f"*{_SUFFIX}")) if self.directory is not None and self.directory.is_dir() else []
        found = {path.stem: self._read(path.stem) for path in on_disk} | self._known
        return {key: table for key, table in found.items() if table is not None and table.entries}

    def add(self, key: str, kernel: str, target: str, new: Iterable[Measurement]) -> TuningTable:
        """Add measurements to a kernel's table, with what other processes added since."""
        with self._lock, self._alone(key):
            known = self._known.get(key) or TuningTable(kernel, target)
            on_disk = self._read(key)
            merged = known.with_entries(on_disk.entries if on_disk else ()).with_entries(new)
            return self._put(key, merged)

    def remove(self, key: str, extents: Extents, schedule: str) -> None:
        """Take one measurement out of a kernel's table."""
        with self._lock, self._alone(key):
            table = self._read(key) or self._known.get(key)
            if table is not None:
                kept = tuple(m for m in table.entries if (m.extents, m.schedule) != (extents, schedule))
                self._put(key, replace(table, entries=kept))

    def _alone(self, key: str) -> contextlib.AbstractContextManager[None]:
        """Between reading a table and writing it back no other process may write it, or what it adds is lost."""
        path = self.path(key)
        if path is None:
            return contextlib.nullcontext()
        with contextlib.suppress(OSError, UnsafeFile):  # reading and writing says what is wrong
            PrivateFolder(path.parent).make()
        return directory_lock(path.parent)

    def _put(self, key: str, table: TuningTable) -> TuningTable:
        global _changes
        self._known[key], _changes = table, _changes + 1
        with contextlib.suppress(OSError):
            self._write(key, table)
        return table

    def _read(self, key: str) -> TuningTable | None:
        path = self.path(key)
        if path is None:
            return None
        try:
            if not path.exists():
                return None
            return _unpack(key, PrivateFolder(path.parent).read(path.name).decode("utf-8"))
        except UnsafeFile as problem:
            say_once(f"the tuning tables in {path.parent} are not used: {problem}")
            return None
        except (OSError, UnicodeDecodeError):
            return None

    def _write(self, key: str, table: TuningTable) -> None:
        path = self.path(key)
        if path is None:
            return
        folder = PrivateFolder(path.parent)
        try:
            folder.require()
            _remove_stale(path.parent)
            folder.write(path.name, _pack(key, table).encode("utf-8"))
        except UnsafeFile as problem:
            say_once(f"the tuning tables in {path.parent} are not used: {problem}")


def _remove_stale(directory: Path) -> None:
    """Remove what processes that were killed while they wrote have left."""
    for left in directory.glob(f"{TEMPORARY}*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _STALE_SECONDS:
                left.unlink()


_store: TuningStore | None = None
_changes = 0


def changes() -> int:
    """A number that is another one after each change of the tables in this process."""
    return _changes


def store() -> TuningStore:
    """The tables of this process."""
    global _store
    if _store is None:
        _store = TuningStore()
    return _store


def use_store(chosen: TuningStore | None) -> None:
    """Use other tables from now on; None is the usual place, looked at anew."""
    global _store, _changes
    _store, _changes = chosen, _changes + 1


def look_up(key: str) -> TuningTable | None:
    """The table of a kernel, unless `TILEWRIGHT_TUNING` is off."""
    return store().get(key) if enabled() else None


def has_any() -> bool:
    """Whether there may be tables at all."""
    return enabled() and store().is_used()


def _pack(key: str, table: TuningTable) -> str:
    body = json.dumps({"format": _FORMAT, **table_data(table)}, indent=1)
    return f"{_digest(key, body)}\n{body}\n"


def table_data(table: TuningTable) -> dict[str, object]:
    """A table as JSON has it."""
    entries = [
        {
            "extents": m.extents, "schedule": m.schedule, "seconds": m.seconds, "error": m.error, "date": m.date, "version": m.version,
            "divisors": m.divisors, "rounds": m.rounds,
        }
        for m in table.entries
    ]  # fmt: skip
    return {"kernel": table.kernel, "target": table.target, "entries": entries}


def table_of(data: Any) -> TuningTable:
    """The table in JSON, with schedules in today's words. Raises KeyError, TypeError, ValueError or OverflowError where it is none."""
    from tilewright.passes.schedules.text import in_new_words

    entries = tuple(
        Measurement(
            _triples(m["extents"]), in_new_words(str(m["schedule"])), float(m["seconds"]), str(m["error"]), str(m["date"]), str(m["version"]),
            _triples(m["divisors"]), int(m["rounds"]),
        )
        for m in data["entries"]
    )  # fmt: skip
    return TuningTable(str(data["kernel"]), str(data["target"]), entries)


def _digest(key: str, body: str) -> str:
    return hashlib.sha256(f"{key}\0{body}".encode()).hexdigest()


def _unpack(key: str, text: str) -> TuningTable | None:
    """The table in a file's text; None when it is damaged or of another format."""
    digest, _, body = text.partition("\n")
    body = body.removesuffix("\n")
    if digest != _digest(key, body):
        return None
    try:
        data = json.loads(body)
        return table_of(data) if data["format"] == _FORMAT else None
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
        return None


def _triples(data: list[list[object]]) -> Extents:
    return tuple((str(array), int(str(axis)), int(str(number))) for array, axis, number in data)
