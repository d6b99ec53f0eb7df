"""Several texts at once: a step makes a token for each of up to eight sequences, whatever their lengths are.

In: the generator of a decoder, prompts. Out: ids of tokens for each prompt. The weights are read once for all sequences. Every sequence has a row of the caches, its own token, its own
position, and a number of tokens that are left to it; a token that stops it takes the rest away, on the device, so that steps that are under way leave it as it is. Prompts are
filled one by one, by the graphs of single texts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np

from tilewright.base.dtypes import DType, i32
from tilewright.base.hooks import asked
from tilewright.execute.devices import array_device
from tilewright.graphs.captured import CapturedStep
from tilewright.graphs.executor import new_zeros
from tilewright.graphs.graph import TensorGraph
from tilewright.models.generation import BATCH, GenerationStats, SamplingSettings, TextGenerator, times_of_engines
from tilewright.models.sampling import add_sampling, sampling_inputs
from tilewright.runtime.core import streams
from tilewright.runtime.memory.device_array import DeviceArray

MOST = 8
"""Sequences of a step."""
STOPS = 8
"""Tokens that end a sequence, at most."""


@dataclass(eq=False)
class BatchGenerator:
    """Steps of `sequences` texts on the device of a generator."""

    single: TextGenerator
    sequences: int
    steps: dict[tuple[tuple[bool, bool, bool], str], Any] = field(default_factory=dict)
    _states: dict[str, Any] = field(default_factory=dict)
    measured: dict[tuple[bool, bool, bool], dict[str, float]] = field(default_factory=dict)
    """Seconds of a step by engine, for `engine="auto"`."""
    stats: GenerationStats = field(default_factory=GenerationStats)

    # -- graphs -------------------------------------------------------------------------------------------------

    def graph(self, settings: SamplingSettings) -> TensorGraph:
        """A step: a token for each sequence, chosen and fed back."""
        count = self.sequences
        net = self.single.make(count)
        net.sequences = count
        g = net.graph
        token, position = g.cache("token", (count,), i32), g.cache("position", (count,), i32)
        history, left = g.cache("history", (count, "longest"), i32), g.cache("left", (count,), i32)
        stops = g.input("stops", (STOPS,), i32)
        logits = self.single.logits_of(net, self.single.describe(net, token, position))
        draws, top_k, top_p = settings.kind
        if not draws:
            chosen = add_sampling(g, logits, position, False, False, False)
            g.output("token", g.op("AdvanceRows", token, position, history, left, chosen, stops, name="advance"))
            return g
        given = sampling_inputs(g, top_k, count)
        words = logits.sizes[-1]
        picked = g.cache("picked", (count,), i32)
        for n in range(count):
            own = given | {"seed": given["seed"][n : n + 1]}
            drawn = add_sampling(g, logits[n : n + 1].reshape((1, words)), position[n : n + 1], True, top_k, top_p, f"sample.{n}", own)
            picked = g.op("SamplePlace", picked, drawn, n, name=f"sample.{n}.place")
        g.output("token", g.op("AdvanceRows", token, position, history, left, picked, stops, name="advance"))
        return g

    def state(self, name: str, shape: tuple[int, ...], dtype: DType) -> Any:
        if name not in self._states:
            self._states[name] = new_zeros(shape, dtype, self.single.place, name)
        return self._states[name]

    def step(self, settings: SamplingSettings, engine: str, stops: Collection[int]) -> Any:
        """The step for such settings, with these as its inputs."""
        found = self.steps.get((settings.kind, engine))
        inputs = self._inputs(settings, stops)
        if found is None:
            g = self.graph(settings)
            g.capacity(longest=self.single.room)
            given: dict[str, Any] = dict(inputs)
            for node in g.nodes.values():
                if node.kind == "cache":
                    tensor = node.results[0]
                    given[node.name] = self.state(node.name, tuple(self.single.room if size.constant is None else size.constant for size in tensor.sizes), tensor.dtype)
            found = self.steps[settings.kind, engine] = g.capture(self.single.place.id, **given) if engine == "graph" else asked("step as one kernel")(g, self.single.place, given)
        for name, array in inputs.items():
            _write(found.inputs[name], array)
        return found

    def _inputs(self, settings: SamplingSettings, stops: Collection[int]) -> dict[str, np.ndarray]:
        ends = np.full(STOPS, -1, np.int32)
        ends[: len(stops)] = sorted(stops)
        found: dict[str, np.ndarray] = {"stops": ends}
        draws, top_k, _ = settings.kind
        if draws:
            seeds = [(settings.seed + n) % (1 << 63) for n in range(self.sequences)]
            found |= {"settings": np.array([1 / settings.temperature, settings.top_p], np.float32), "seed": np.array(seeds, np.int64)}
        return found | ({"top_k": np.array([settings.top_k], np.int64)} if top_k else {})

    # -- running ------------------------------------------------------------------------------------------------

    def choose_engine(self, settings: SamplingSettings, engine: str, stops: Collection[int]) -> str:
        """The engine itself; for `auto` the one that is faster for so many sequences, which is measured once: a few steps of each, from the beginning of the caches."""
        if engine != "auto":
            return engine

        def time_of(name: str) -> float:
            step = self.step(settings, name, stops)
            return self.single.time_of(self.single.advance_of(step), self._begin)

        if settings.kind not in self.measured:
            self.measured[settings.kind] = times_of_engines(time_of)
        found = self.measured[settings.kind]
        return min(found, key=lambda name: found[name])

    def _begin(self) -> None:
        """All sequences at the beginning of their caches, with tokens left to them."""
        for name, value in (("token", 0), ("position", 0), ("left", self.single.room)):
            _write(self._states[name], np.full(self.sequences, value, np.int32))
        _read(self._states["position"])

    def run(self, prompts: Sequence[Sequence[int]], counts: Sequence[int], settings: SamplingSettings, stops: Collection[int] = (), engine: str = "graph") -> list[list[int]]:
        """Ids that follow each prompt, at most so many; a token that stops is the last of its text."""
        chosen = self.choose_engine(settings, engine, stops)
        stats = self.stats = GenerationStats(prompt_tokens=sum(map(len, prompts)), engine=chosen, measured=dict(self.measured.get(settings.kind, {})) if engine == "auto" else {})
        start = perf_counter()
        step = self.step(settings, chosen, stops)
        for row, ids in enumerate(prompts):
            self._fill(row, ids)
        missing = self.sequences - len(prompts)
        _write(self._states["token"], np.array([*(ids[-1] for ids in prompts), *[0] * missing], np.int32))
        _write(self._states["position"], np.array([*(len(ids) - 1 for ids in prompts), *[0] * missing], np.int32))
        _write(self._states["left"], np.array([*counts, *[0] * missing], np.int32))
        advance = self.single.advance_of(step)
        stats.prompt_seconds = perf_counter() - start
        begun, most, on_gpu = perf_counter(), max(counts, default=0), array_device(self.single.place) is not None
        while most > 0:
            now = min(most, BATCH if on_gpu else 1)
            advance(now)
            most = min(most - now, int(_read(self._states["left"]).max()))
        ends, history = _read(self._states["position"]), _read(self._states["history"])
        found = [history[row, len(ids) - 1 : ends[row]].tolist() for row, ids in enumerate(prompts)]
        stats.tokens, stats.seconds = sum(map(len, found)), perf_counter() - begun
        return found

    def _fill(self, row: int, ids: Sequence[int]) -> None:
        """Keys and values of a prompt but for its last token, in a row of the caches."""
        single = self.single
        if len(ids) < 2:
            return
        single.prepare(len(ids) - 1)
        single.known.clear()
        single.fill(ids[:-1])
        for name, target in self._states.items():
            source = single.states.get(name)
            if name.startswith(("keys.", "values.")) and source is not None:
                part, given = target[row, : len(ids) - 1], source[: len(ids) - 1]
                if isinstance(target, DeviceArray):
                    target.device.copy(part, given, streams.current(target.device.ordinal) or 0)
                else:
                    part[...] = given

    def close(self) -> None:
        """Give up what steps hold."""
        for step in self.steps.values():
            if hasattr(step, "close") and not isinstance(step, CapturedStep):
                step.close()
        self.steps.clear()
        self._states.clear()


def _write(target: Any, array: np.ndarray) -> None:
    if isinstance(target, DeviceArray):
        target.copy_from(array)
    else:
        target[...] = array


def _read(array: Any) -> np.ndarray:
    return np.array(array.numpy() if isinstance(array, DeviceArray) else array)
