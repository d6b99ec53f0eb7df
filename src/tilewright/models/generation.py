"""Text from a decoder: the prompt in chunks, then one captured step for each token.

In: a description of a network and its weights. Out: ids of tokens. The caches of keys and values stay on the device, and so do the token and its position: a step
chooses the next token, and the next step reads it there. The host reads ids behind the device: on a GPU several steps are under way before it looks.

A prompt is cut into chunks of a few fixed sizes, so that few programs serve all lengths. What a chunk has too many is filled up; rows that it writes to the caches behind
the prompt are written again before anybody reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np

from tilewright.base.dtypes import DType, f32, i32
from tilewright.base.errors import DeviceError, TilewrightError, UserError
from tilewright.base.hooks import asked
from tilewright.execute.devices import Device, array_device
from tilewright.graphs.captured import CapturedStep
from tilewright.graphs.executor import new_zeros
from tilewright.graphs.graph import TensorGraph
from tilewright.graphs.tensor import Tensor
from tilewright.models.network import Network
from tilewright.models.sampling import add_sampling
from tilewright.runtime.core import streams
from tilewright.runtime.memory.device_array import DeviceArray

CHUNKS = (8, 32, 128, 512)
"""How many tokens of a prompt are computed at once."""
ENGINES = ("graph", "mega", "auto")
MEASURED_STEPS = 4
"""Steps that are timed together where engines are compared."""
BATCH = 16
"""Steps under way on a GPU before the host reads what they chose."""


@dataclass(frozen=True)
class SamplingSettings:
    """How the next token is chosen. Without a temperature it is the best one."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def check(self) -> None:
        rules: tuple[tuple[str, Any, Callable[[Any], bool], str], ...] = (
            ("temperature", self.temperature, lambda v: 0 <= v < float("inf"), "a number from 0 on; 0 chooses the best token"),
            ("top_k", self.top_k, lambda v: v >= 0 and v == int(v), "how many of the best tokens are drawn from; 0 is all"),
            ("top_p", self.top_p, lambda v: 0 < v <= 1, "a probability above 0 and up to 1"),
            ("seed", self.seed, lambda v: v == int(v) and 0 <= v < 1 << 63, "a whole number from 0 on, below 2^63"),
        )  # fmt: skip
        for name, value, fits, wanted in rules:
            if isinstance(value, bool) or not isinstance(value, int | float) or not fits(value):
                raise UserError.at("TW009", f"{name} is {value!r}", help=f"give {wanted}")
        if not self.temperature and (self.top_k or self.top_p < 1):
            raise UserError.at("TW016", f"top_k={self.top_k} and top_p={self.top_p} do nothing without a temperature: the best token is chosen", help="give temperature=, or leave them out")

    @property
    def kind(self) -> tuple[bool, bool, bool]:
        """What decides which nodes a step has."""
        return self.temperature > 0, self.top_k > 0, self.top_p < 1


@dataclass
class GenerationStats:
    """Of one generation: how many tokens there were, and how long they took."""

    prompt_tokens: int = 0
    reused_tokens: int = 0
    """Of the prompt, those that were in the caches already."""
    prompt_seconds: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    first_token_seconds: float = 0.0
    engine: str = "graph"
    """What ran the steps: `graph` or `mega`."""
    measured: dict[str, float] = field(default_factory=dict)
    """Of `engine="auto"`: seconds of a step by engine; one that refuses the model has none."""

    @property
    def prompt_rate(self) -> float:
        return (self.prompt_tokens - self.reused_tokens) / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def rate(self) -> float:
        """Tokens a second, the first one aside: it waits for the prompt."""
        return (self.tokens - 1) / self.seconds if self.seconds and self.tokens > 1 else 0.0


def times_of_engines(time_of: Callable[[str], float]) -> dict[str, float]:
    """Seconds of a step by engine. One that refuses the model has none; every model has a graph."""
    found: dict[str, float] = {}
    for name in ENGINES[:-1]:
        try:
            found[name] = time_of(name)
        except TilewrightError:
            if name == ENGINES[0]:
                raise
    return found


def chunks_of(count: int) -> list[tuple[int, int]]:
    """A prompt of so many tokens as (chunk, tokens of the prompt in it)."""
    found: list[tuple[int, int]] = []
    while count:
        fits = next((size for size in CHUNKS if size >= count), CHUNKS[-1])
        smaller = max((size for size in CHUNKS if size <= count), default=CHUNKS[0])
        size = fits if count * 2 > fits or smaller > count else smaller
        found.append((size, min(size, count)))
        count -= min(size, count)
    return found


@dataclass(eq=False)
class TextGenerator:
    """Captured graphs of one decoder on one device, and its caches. `describe(net, ids, position)` gives the last hidden rows."""

    make: Callable[[int], Network]
    """A network for so many tokens."""
    describe: Callable[[Network, Tensor, Tensor], Tensor]
    place: Device
    context: int
    cache_dtype: DType = f32
    known: list[int] = field(default_factory=list)
    """Tokens whose keys and values are in the caches."""

    def __post_init__(self) -> None:
        self.room = -(-self.context // 64) * 64 + CHUNKS[-1]
        self.steps: dict[tuple[tuple[bool, bool, bool], str], Any] = {}
        """Captured graphs (`CapturedStep`) and megakernels (`mega.engine.MegaStep`), by what they choose and by engine."""
        self.measured: dict[tuple[bool, bool, bool], dict[str, float]] = {}
        self.prompts: dict[int, CapturedStep] = {}
        self.scorers: dict[int, CapturedStep] = {}
        self._states: dict[str, Any] = {}
        self.stats = GenerationStats()

    # -- graphs -------------------------------------------------------------------------------------------------

    def state(self, name: str, shape: tuple[int, ...], dtype: DType) -> Any:
        """An array of the device that all graphs share."""
        if name not in self._states:
            try:
                self._states[name] = new_zeros(shape, dtype, self.place, name)
            except DeviceError as error:
                if error.code != "TW031":
                    raise
                raise self._too_little(error) from None
        return self._states[name]

    @property
    def states(self) -> dict[str, Any]:
        """Arrays of the device, by name."""
        return self._states

    def cache_bytes(self, room: int) -> int:
        shape = self.make(1).shape
        return 2 * shape.layers * room * shape.groups * shape.depth * self.cache_dtype.itemsize

    def _too_little(self, error: DeviceError) -> DeviceError:
        needed, got = self.cache_bytes(self.room), sum(a.nbytes for a in self._states.values())
        fits = int(got / max(1, self.cache_bytes(1))) - CHUNKS[-1] - 64
        found = DeviceError.at(
            "TW031", f"no memory on '{self.place.id}' for the caches of a context of {self.context}: they take {needed:,} bytes, and {got:,} were there: {error.diagnostics[0].message}",
            help=f"context={max(fits, 0)} would fit" if fits > 0 else "no context fits beside the weights: use another device",
        )  # fmt: skip
        assert isinstance(found, DeviceError)
        return found

    def _captured(self, g: TensorGraph, inputs: dict[str, Any]) -> CapturedStep:
        return g.capture(self.place.id, **self._with_states(g, inputs))

    def _with_states(self, g: TensorGraph, inputs: dict[str, Any]) -> dict[str, Any]:
        """The inputs, and the caches of all graphs."""
        if any("longest" in size.names for node in g.nodes.values() if node.kind == "cache" for size in node.results[0].sizes):
            g.capacity(longest=self.room)
        for node in g.nodes.values():
            if node.kind == "cache":
                tensor = node.results[0]
                shape = tuple(self.room if size.constant is None else size.constant for size in tensor.sizes)
                inputs[node.name] = self.state(node.name, shape, tensor.dtype)
        return inputs

    def logits_of(self, net: Network, rows: Tensor) -> Tensor:
        """Of hidden rows: by the output's weight, or by the embedding where there is none."""
        name = "output" if net.has("output.weight") else "token_embd"
        weight = net.weight(f"{name}.weight", None, net.shape.width)
        return net.op("MulMat", rows, weight, name="logits", **net.product_options(weight))

    def step(self, settings: SamplingSettings, engine: str = "graph") -> Any:
        """One token: its logits, the choice of the next one, and its way back."""
        found = self.steps.get((settings.kind, engine))
        if found is None:
            net = self.make(1)
            g = net.graph
            token, position = g.cache("token", (1,), i32), g.cache("position", (1,), i32)
            logits = self.logits_of(net, self.describe(net, token, position))
            chosen = add_sampling(g, logits, position, *settings.kind)
            g.output("token", g.op("Advance", token, position, g.cache("history", ("longest",), i32), chosen, name="advance"))
            kept = [array.copy() for array in (self.state("token", (1,), i32), self.state("position", (1,), i32))]
            inputs = self._with_states(g, self._sampling_inputs(settings))
            found = self.steps[settings.kind, engine] = g.capture(self.place.id, **inputs) if engine == "graph" else asked("step as one kernel")(g, self.place, inputs)
            for name, array in zip(("token", "position"), kept, strict=True):  # recording on a host runs the step
                self._states[name][...] = array
        inputs = self._sampling_inputs(settings)
        for name, array in inputs.items():
            target = found.inputs[name]
            if isinstance(target, DeviceArray):
                target.copy_from(array)
            else:
                target[...] = array
        return found

    def choose_engine(self, settings: SamplingSettings, engine: str) -> str:
        """The engine itself; for `auto` the one that is faster here, which is measured once: a few steps of each, from the beginning of the caches."""
        if engine != "auto":
            return engine
        if settings.kind not in self.measured:
            self.known.clear()
            self.measured[settings.kind] = times_of_engines(lambda name: self.time_of(self.advance_of(self.step(settings, name)), self._begin))
        found = self.measured[settings.kind]
        return min(found, key=lambda name: found[name])

    def _begin(self) -> None:
        """The first token of the caches."""
        self._write("token", 0)
        self._write("position", 0)
        self._finish()

    def time_of(self, advance: Callable[[int], Any], begin: Callable[[], None]) -> float:
        """Seconds of a step: the best of three launches, after one, each from what `begin` sets. On a GPU a launch has as many steps as generation asks for at once."""
        count, best = min(self.room, BATCH if array_device(self.place) is not None else MEASURED_STEPS), float("inf")
        for _ in range(4):
            begin()
            start = perf_counter()
            advance(count)
            self._finish()
            best = min(best, (perf_counter() - start) / count)
        return best

    def _finish(self) -> None:
        """Wait for what is under way."""
        position = self._states["position"]
        if isinstance(position, DeviceArray):
            position.numpy()

    @staticmethod
    def advance_of(step: Any) -> Callable[[int], Any]:
        """So many steps, one after the other."""
        if not isinstance(step, CapturedStep):
            advance: Callable[[int], Any] = step
            return advance
        replay = step.graph.replay if step.graph is not None else step

        def run(steps: int) -> None:
            for _ in range(steps):
                replay()

        return run

    @staticmethod
    def _sampling_inputs(settings: SamplingSettings) -> dict[str, Any]:
        draws, top_k, _ = settings.kind
        if not draws:
            return {}
        found = {"settings": np.array([1 / settings.temperature, settings.top_p], np.float32), "seed": np.array([settings.seed], np.int64)}
        return found | ({"top_k": np.array([settings.top_k], np.int64)} if top_k else {})

    def _chunk(self, size: int, scores: bool) -> CapturedStep:
        """So many tokens at once, which fill the caches; with `scores`, their logits too."""
        table = self.scorers if scores else self.prompts
        found = table.get(size)
        if found is None:
            net = self.make(size)
            g = net.graph
            ids, position = g.input("ids", (size,), i32), g.input("position", (1,), i32)
            rows = self.describe(net, ids, position)
            if scores:
                g.output("logits", self.logits_of(net, rows))
            else:
                # All that is wanted is in the caches: the last of them needs all that comes before it.
                for name in ("keys", "values"):
                    last = next(node for node in reversed(g.nodes.values()) if node.op == "KVAppend" and node.inputs["cache"].name.startswith(name))  # type: ignore[union-attr]
                    g.output(name, last.results[0])
            found = table[size] = self._captured(g, {"ids": np.zeros(size, np.int32), "position": np.zeros(1, np.int32)})
            self.known.clear()
        return found

    # -- running ------------------------------------------------------------------------------------------------

    def prepare(self, count: int) -> None:
        """Record the chunks that a prompt of so many tokens needs: recording on a host writes the caches."""
        for size, _ in chunks_of(count):
            self._chunk(size, False)

    def fill(self, ids: Sequence[int]) -> None:
        """Keys and values of these tokens, behind those that are known."""
        self.prepare(len(ids))
        for size, count in chunks_of(len(ids)):
            at, padded = len(self.known), np.zeros(size, np.int32)
            padded[:count] = ids[:count]
            self._chunk(size, False)(ids=padded, position=np.array([at], np.int32))
            self.known += [int(i) for i in ids[:count]]
            ids = ids[count:]

    def scores(self, ids: Sequence[int], words: int) -> np.ndarray:
        """Logits after each token, from the beginning."""
        out = np.empty((len(ids), words), np.float32)
        at = 0
        for size, count in chunks_of(len(ids)):
            padded = np.zeros(size, np.int32)
            padded[:count] = ids[at : at + count]
            made = self._chunk(size, True)(ids=padded, position=np.array([at], np.int32))
            out[at : at + count] = np.asarray(made.to_host() if isinstance(made, DeviceArray) else made)[:count]
            at += count
        self.known.clear()
        return out

    def tokens(self, ids: Sequence[int], count: int, settings: SamplingSettings, engine: str = "graph") -> Iterator[int]:
        """Ids that follow a prompt, one after the other."""
        stats = self.stats = GenerationStats(prompt_tokens=len(ids))
        stats.engine = self.choose_engine(settings, engine)
        stats.measured = dict(self.measured.get(settings.kind, {})) if engine == "auto" else {}
        start = perf_counter()
        step = self.step(settings, stats.engine)
        self.prepare(len(ids) - 1)
        same = next((n for n, (a, b) in enumerate(zip(self.known, ids, strict=False)) if a != b), min(len(self.known), len(ids)))
        stats.reused_tokens = min(same, len(ids) - 1)
        del self.known[stats.reused_tokens :]
        self.fill(ids[stats.reused_tokens : -1])
        self._write("token", ids[-1])
        self._write("position", len(ids) - 1)
        self.known.append(int(ids[-1]))
        advance = self.advance_of(step)
        begun = 0.0
        produce = self._behind if isinstance(self._states["history"], DeviceArray) else self._at_once
        for token in produce(advance, len(ids) - 1, count):
            now = perf_counter()
            if not stats.tokens:
                stats.prompt_seconds = stats.first_token_seconds = now - start
                begun = now
            stats.tokens += 1
            stats.seconds = now - begun
            yield token
            self.known.append(token)

    def _write(self, name: str, value: int) -> None:
        target, array = self._states[name], np.array([value], np.int32)
        if isinstance(target, DeviceArray):
            target.copy_from(array)
        else:
            target[...] = array

    def _at_once(self, advance: Callable[[int], Any], at: int, count: int) -> Iterator[int]:
        history = self._states["history"]
        for number in range(count):
            advance(1)
            yield int(history[at + number])

    def _behind(self, advance: Callable[[int], Any], at: int, count: int) -> Iterator[int]:
        """Steps in batches, of which one is always under way while another is read; the first ones are short."""
        gpu = array_device(self.place)
        assert gpu is not None
        history, made, size = self._states["history"], 0, 1
        under_way: list[tuple[Any, np.ndarray]] = []
        while made < count or under_way:
            while made < count and len(under_way) < 2:
                many = min(size, count - made)
                advance(many)
                target = np.empty(many, np.int32)
                part = history[at + made : at + made + many]
                under_way.append((gpu.copy_out_async(target, part, streams.current(gpu.ordinal) or 0), target))
                made, size = made + many, min(2 * size, BATCH)
            transfer, ids = under_way.pop(0)
            transfer.wait()
            yield from (int(i) for i in ids)
