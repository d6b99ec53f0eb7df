"""Jobs of the kinds `families` and `families-cpu`, and the table by family: the lowest, the middle, and how many are under 0.8 of the peer."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

from bench.families.measure import FAMILIES, cases
from bench.harness import Case, HostClock, Plan, Record, Setting, measure

CLIFF = 0.8
"""No draw should be under this part of the peer's speed."""

Work = tuple[str, str, Callable[[], Iterator[Record]]]


def works(kind: str, setting: Setting, quick: bool, seed: int, draws: int) -> Iterator[Work]:
    """(label, family, what makes the record) of every draw."""
    if kind == "families-cpu":
        # A rest between variants: the threads of OpenBLAS and of OpenMP spin for a tenth of a second and longer.
        plan = Plan(rounds=6, per_round=3, warmups=1, seconds=6.0, rest=0.3) if quick else Plan(rounds=10, per_round=4, warmups=2, seconds=12.0, rest=0.3)
        clock = HostClock()
        for case in cases(seed, draws, "cpu"):
            yield case.label, case.op, lambda case=case: iter([measure(case, clock, plan, setting)])  # type: ignore[misc]
        return
    from bench import gpu

    session = gpu.Session.open(setting, quick)
    used = Plan(4, 2, 2, 1.0) if quick else session.plan

    def run(case: Case) -> Iterator[Record]:
        yield measure(case, session.machine.clock, used, setting)
        session.release()

    for case in cases(seed, draws, "gpu", compiled=not quick):
        yield case.label, case.op, lambda case=case: run(case)  # type: ignore[misc]


def ranges(device: str) -> str:
    """What each family draws from, a line each."""
    return "\n".join(f"{family.name} (bar {family.bars[device]}): {family.ranges}" for family in FAMILIES if device in family.bars)


def summary(records: list[Record]) -> str:
    """A line for each family, then the draws that are under `CLIFF`."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record.op, []).append(record)
    lines = [f"{'family':<20} {'draws':>5} {'lowest':>7} {'middle':>7} {'bar':>5}  under {CLIFF}"]
    for name, several in found.items():
        ratios = [r.ratio for r in several if r.ratio is not None]
        if not ratios:
            lines.append(f"{name:<20} {len(several):>5}       -       -")
            continue
        lines.append(f"{name:<20} {len(several):>5} {min(ratios):>7.2f} {statistics.median(ratios):>7.2f} {several[0].bar:>5}  {sum(r < CLIFF for r in ratios)}")
    low = sorted((r for r in records if r.ratio is not None and r.ratio < CLIFF), key=lambda r: r.ratio or 0.0)
    lines += [f"  {r.ratio:.3f} {r.op} {'x'.join(map(str, r.shape))} {r.dtype}: {'; '.join(r.notes)} ({r.ours_ms:.3g} ms, {r.peer} {r.peer_ms:.3g})" for r in low]
    return "\n".join(lines)
