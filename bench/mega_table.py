"""A row for every figure of megakernels: what a step takes, what a dependency costs, how long making it takes, and a soak.

In: a GPU. Out: one record for each row, printed as JSON lines, and kept in `bench/results` with `--save`. Weights are random; each row measures its peers in the same run.

    XDG_CACHE_HOME=$(mktemp -d) python -m bench.mega_table [--save] [--soak SECONDS] [ROW ...]

Rows: step (with made and waits), batch, 8b, gemma, soak. Without names all but the soak run; the figure of `made` is that of an empty cache, so the command makes one.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import time
from typing import Any

import numpy as np

from bench import mega
from bench.decode_step import POSITION, prepared_steps
from bench.harness import Record, Setting
from bench.run import commit, keep

ROWS = ("step", "batch", "8b", "gemma", "soak")
SHAPE = [28, 1536, 8960, 151936]


class Table:
    """The rows of a run."""

    def __init__(self, torch: Any, place: Any, soak_seconds: float) -> None:
        self.torch, self.place, self.soak_seconds = torch, place, soak_seconds
        self.setting = Setting(torch.cuda.get_device_name(), commit(), datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))
        self.records: list[Record] = []

    def add(self, dtype: str, ours: float | None, bar_ms: float | None, peers: dict[str, float], notes: list[str], shape: list[int] | None = None, bar: float | None = None, ratio: float | None = None) -> None:
        best = min(peers, key=lambda name: peers[name], default=None)
        against = peers[best] if best is not None else None
        record = Record("mega", shape or SHAPE, dtype, self.setting.device, ours, None, best, against, against / ours if against and ours else None)
        record.peers, record.bar, record.bar_ms, record.bar_ratio, record.notes = peers, bar, bar_ms, ratio, notes
        record.commit, record.date = self.setting.commit, self.setting.date
        self.records.append(record)
        met = "" if record.met is None else ", met" if record.met else ", missed"
        print(f"{dtype}: {f'{ours:.4g} ms' if ours is not None else '-'}{met}; {peers}; {'; '.join(notes)}", flush=True)

    def step(self) -> None:
        """One sequence; what its waits cost; plan and compile, cold and from the cache."""
        from tilewright.mega.engine import MegaStep
        from tilewright.mega.persistent.entry import PersistentStep

        torch, place = self.torch, self.place
        captured, _, graph, g = prepared_steps()
        wanted = torch.from_dlpack(captured()["logits"]).float().clone()
        graph_ms, torch_ms = mega.median_ms(torch, captured.graph.replay), mega.median_ms(torch, graph.replay)
        given = {"token": place.runtime.from_numpy(np.array([17], np.int32)), "position": place.runtime.from_numpy(np.array([POSITION], np.int32))}
        made: list[tuple[float, bool]] = []
        for _ in range(2):
            start = time.perf_counter()
            one = MegaStep(g, place, given, steps=1)
            made.append((time.perf_counter() - start, one.from_cache))
            one.close()
        plan = g.plan(token=(1,), position=(1,))
        step = PersistentStep(g.executor, plan, place, given)
        step.launch()
        torch.cuda.synchronize()
        error = float((torch.from_dlpack(step.outputs["logits"]).float() - wanted).abs().max() / wanted.std())
        ms = mega.median_ms(torch, step.launch)
        figures: dict[str, float] = {}
        for name, options in (("no ring", {"ring_bytes": 0}), ("no ring, no waits", {"ring_bytes": 0, "waits": False}), ("no waits", {"waits": False})):
            other = PersistentStep(g.executor, plan, place, given, planned=step.step, **options)
            figures[name] = mega.median_ms(torch, other.launch, 100)
            other.close()
        clocked = PersistentStep(g.executor, plan, place, given, planned=step.step, clocks=True)
        for _ in range(3):
            clocked.launch()
        torch.cuda.synchronize()
        late, resolution = mega.breakdown(clocked)
        clocked.close()
        ring = f"a ring of {step.ring.nbytes >> 10} KB" if step.ring.ops else "no ring"
        said = [f"{ring}; {', '.join(f'{name} {value:.3f} ms' for name, value in figures.items())}; logits off by {error:.2g} standard deviations"]
        self.add("bf16, position 511", ms, 1.0, {"our graph": graph_ms, "torch graph": torch_ms}, said)
        self.add("bf16, position 511, against torch's graph", ms, None, {"torch graph": torch_ms}, [], bar=2.9)
        each, by_ring = (figures["no ring"] - figures["no ring, no waits"]) / step.waits, (ms - figures["no waits"]) / step.waits
        self.add("a dependency: (step - step without waits) / waits", each, 1e-3, {}, [f"{step.waits} waits; with {ring} {by_ring * 1e3:.2f} us; by the device's clock (steps of {resolution:.0f} ns) the last block wakes {late:.2f} us after the last op ended"])
        (cold, kept), (again, from_cache) = made
        self.add("plan and compile", cold * 1e3, 20e3, {}, ["from the cache: not a cold figure" if kept else "cold"])
        self.add("plan and compile, cached", again * 1e3, 200.0, {}, ["" if from_cache else "not from the cache"])
        step.close()

    def batch(self) -> None:
        context, graph_ms, found = mega.batch(self.torch, self.place, 8, ({}, {"waits": False}))
        self.add("bf16, batch 8, position 511", found[0], 1.15, {"our graph": graph_ms}, [f"context {context / 1e6:.0f} MB; without waits (wrong results) {found[1]:.3f} ms"])

    def eight_billion(self) -> None:
        nbytes, copied, graph_ms, ms = mega.eight_billion(self.torch, self.place)
        share = nbytes / ms / 1e9 / copied
        self.add("bf16, 8 B weights, share of a copy's bandwidth", ms, None, {"our graph": graph_ms}, [f"{nbytes / 1e9:.2f} GB of weights, {share:.1%} of a copy ({copied:.2f} TB/s)"], [32, 4096, 14336, 128256], 0.8, share)

    def gemma(self) -> None:
        for position, graph_rate, rate, same in mega.gemma(self.torch, self.place):
            notes = [f"{rate:.0f} tokens/s, our graph {graph_rate:.0f}; {same} of 64 tokens the same"]
            self.add(f"Gemma 3 270M, Q4_K_M, positions {position} to {position + 64}", 1e3 / rate, 1e3 / 5000, {"our graph": 1e3 / graph_rate}, notes, [18, 640, 2048, 262144])

    def soak(self) -> None:
        self.add("soak", None, None, {}, mega.soak(self.torch, self.place, self.soak_seconds))

    def run(self, names: list[str]) -> None:
        for name in names:
            try:
                (self.eight_billion if name == "8b" else getattr(self, name))()
            except Exception as error:  # the table goes on
                self.add(name, None, None, {}, [])
                self.records[-1].error = f"{type(error).__name__}: {str(error)[:600]}"
                print(self.records[-1].error, flush=True)
            self.torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.mega_table", description="A row for every figure of megakernels.")
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"{', '.join(ROWS)}; all but the soak where none is given")
    parser.add_argument("--save", action="store_true", help="keep the rows in bench/results")
    parser.add_argument("--soak", type=float, default=120.0, metavar="SECONDS", help="after which the soak ends")
    chosen = parser.parse_args()
    if unknown := [name for name in chosen.rows if name not in ROWS]:
        parser.error(f"no row {', '.join(unknown)}: there are {', '.join(ROWS)}")
    from tilewright.execute.devices import find_device

    table = Table(importlib.import_module("torch"), find_device("cuda"), chosen.soak)
    table.run(chosen.rows or list(ROWS[:-1]))
    for record in table.records:
        print(record.line())
    if chosen.save:
        keep(table.records, "mega", table.setting)
    return 1 if any(record.error for record in table.records) else 0


if __name__ == "__main__":
    raise SystemExit(main())
