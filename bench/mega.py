"""One decode step as one persistent kernel, against the captured graph of the same step, and against itself without waits.

In: whether the run is quick. Out: rows of a table. Weights are random, in bf16, of the shapes of Qwen2.5-1.5B, and the step is at position 511.

    python -m bench.run mega                    the rows of the table of results
    python -m bench.mega [quick]                variants, and the time of each op
    python -m bench.mega gemma                  tokens a second of Gemma 3 270M, Q4_K_M
    python -m bench.mega batch [N]              a step of N sequences (8), with the bytes of their caches
    python -m bench.mega 8b                     a step of a model of 8 B weights, against the bandwidth of a copy
    python -m bench.mega soak [SECONDS]         a million launches of a small tape whose blocks sleep at random, then 20,000 steps of 1.5 B weights; it says how far it came
    python -m bench.mega gantt [FOLDER]         the picture of a step, and the time of each op
    python -m bench.mega_table [--save]         a row for each of these
"""

from __future__ import annotations

import functools
import importlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.decode_step import POSITION, prepared_steps, qwen_shape
from bench.harness import OURS, Bar, Case, Prepared, Variant

LIMIT = 30
"""Seconds after which no further variant is made."""


def median_ms(torch: Any, run: Any, times: int = 200) -> float:
    """The median of single runs by events of the device."""
    for _ in range(3):
        run()
    pairs = []
    for _ in range(times):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        run()
        last.record()
        pairs.append((first, last))
    torch.cuda.synchronize()
    return float(np.median([a.elapsed_time(b) for a, b in pairs]))


def step_of(graph: Any, place: Any, **options: Any) -> tuple[Any, float]:
    """The step as one launch, and the seconds that it took to make it."""
    from tilewright.mega.persistent.entry import PersistentStep

    start = time.perf_counter()
    inputs = {"token": np.array([17], np.int32), "position": np.array([POSITION], np.int32)}
    gpu = {name: place.runtime.from_numpy(value) for name, value in inputs.items()}
    plan = graph.plan(token=(1,), position=(1,))
    return PersistentStep(graph.executor, plan, place, gpu, **options), time.perf_counter() - start


def breakdown(made: Any) -> tuple[float, float]:
    """Where the time of a step goes, op by op: medians over blocks and layers, in microseconds. Gives the median of how late the last block wakes, in microseconds, and the clock's step in nanoseconds."""
    times = made.stamps().astype(np.float64)
    numbers = [number for number, _ in made.instance_titles()]
    titles = {op.number: op.title for op in made.step.ops}
    ends = np.where(times[:, :, 2] > 0, times[:, :, 2], np.nan)
    begins = np.where(times[:, :, 0] > 0, times[:, :, 0], np.nan)
    went = np.where(times[:, :, 1] > 0, times[:, :, 1], np.nan)
    print("op: waited median, went on after the last op ended (first, last block), tasks median, op ends after the one before")
    last, late = np.nanmax(ends, axis=0), []
    for number in dict.fromkeys(numbers):
        which = [n for n, other in enumerate(numbers) if other == number]
        after = [n for n in which if n]
        span = np.median([last[n] - last[n - 1] for n in after]) if after else np.nan
        woke = np.median([np.nanmin(went[:, n]) - last[n - 1] for n in after]) if after else np.nan
        woke_last = np.median([np.nanmax(went[:, n]) - last[n - 1] for n in after]) if after else np.nan
        late += [np.nanmax(went[:, n]) - last[n - 1] for n in after]
        waited, worked = np.nanmedian((went - begins)[:, which]), np.nanmedian((ends - went)[:, which])
        print(f"  {titles[number]:24s} {waited / 1e3:7.2f} {woke / 1e3:7.2f} {woke_last / 1e3:7.2f} {worked / 1e3:7.2f} {span / 1e3:7.2f}")
    steps = np.unique(np.diff(np.unique(times[times > 0])))
    print(f"  clock: steps of {steps[0]:.0f} ns, whole step {(np.nanmax(ends) - np.nanmin(begins)) / 1e3:.1f} us", flush=True)
    return float(np.median(late)) / 1e3, float(steps[0])


def gemma(torch: Any, place: Any) -> list[tuple[int, float, float, int]]:
    """Gemma's shapes, Q4_K_M: tokens a second of the captured graph and of launches of 64 steps, and whether they choose the same. Gives (position, tokens/s of the graph, tokens/s, tokens of 64 that are the same)."""
    import tempfile
    from pathlib import Path

    import tilewright as tw
    from bench.model_files import gemma_file
    from tilewright.mega.persistent.entry import PersistentStep
    from tilewright.models.generation import SamplingSettings

    begin = time.perf_counter()
    known = Path("/tmp/tw-models")
    found = sorted(known.glob("*.gguf")) if known.is_dir() else []
    path = next((p for p in found if 200e6 < p.stat().st_size < 400e6), None) or gemma_file(Path(tempfile.mkdtemp()) / "gemma.gguf")
    model = tw.models.load(path, device="cuda", context=1024)
    generator = model.generator
    captured = generator.step(SamplingSettings())
    rng = np.random.default_rng(3)
    for name, state in generator.states.items():
        if name.startswith(("keys.", "values.")):
            state.copy_from(rng.standard_normal(state.shape).astype(np.float16))
    print(f"gemma: ready after {time.perf_counter() - begin:.1f} s, {captured.nodes} launches a step", flush=True)

    def again(position: int) -> None:
        generator._write("token", 77)
        generator._write("position", position)

    def tokens(position: int) -> list[int]:
        torch.cuda.synchronize()
        return [int(t) for t in generator.states["history"].numpy()[position : position + 64]]

    start = time.perf_counter()
    step = PersistentStep(captured.executor, captured.plan, place, captured.inputs, steps=64)
    print(f"gemma: persistent step of {len(step.step.ops)} ops, {step.waits} waits, made in {time.perf_counter() - start:.1f} s", flush=True)
    figures: list[tuple[int, float, float, int]] = []
    for position in (128, 448):
        again(position)
        for _ in range(64):
            captured.graph.replay()
        wanted = tokens(position)
        again(position)
        step.launch(64)
        same = sum(a == b for a, b in zip(wanted, tokens(position), strict=True))
        again(position)
        graph_ms = median_ms(torch, captured.graph.replay, 50)

        def launch(position: int = position) -> None:
            again(position)
            step.launch(64)

        ms = median_ms(torch, launch, 5) / 64
        print(f"gemma, positions {position} to {position + 64}: graph {1e3 / graph_ms:.0f} tokens/s, persistent {1e3 / ms:.0f} tokens/s, {same} of 64 tokens the same", flush=True)
        figures.append((position, 1e3 / graph_ms, 1e3 / ms, same))
    return figures


def ready_step(torch: Any, place: Any, shape: Any, sequences: int = 1, shared_embedding: bool = True) -> tuple[Any, dict[str, Any], int]:
    """A graph of random weights with random caches on the device, the arrays of its inputs, and the bytes of its weights."""
    import tilewright as tw
    from bench.decode_step import LONGEST, example

    generator = torch.Generator(device="cuda").manual_seed(5)
    weights: dict[str, Any] = {}
    for name, extents in shape.weights().items():
        if shared_embedding and name == "output":
            continue
        values = torch.empty(extents, device="cuda", dtype=torch.bfloat16).normal_(generator=generator).mul_(extents[-1] ** -0.5)
        weights[name] = values.mul_(0.1).add_(1) if "norm" in name else values
    if shared_embedding:
        weights["output"] = weights["embed"]
    g = example().build(shape, weights, tw.bf16, LONGEST, sequences=sequences)
    for n in range(shape.layers):
        for name in ("keys", "values"):
            state = g.state(f"{name}.{n}", "cuda")
            source = torch.empty(tuple(state.shape), device="cuda", dtype=torch.bfloat16).normal_(generator=generator)
            state.device.copy(state, state.device.wrap(source), 0)
    torch.cuda.synchronize()
    tokens, positions = np.arange(17, 17 + sequences, dtype=np.int32), np.full(sequences, POSITION, np.int32)
    inputs = {"token": place.runtime.from_numpy(tokens), "position": place.runtime.from_numpy(positions)}
    nbytes = 2 * sum(int(np.prod(e)) for name, e in shape.weights().items() if name != "embed")
    return g, inputs, nbytes


def batch(torch: Any, place: Any, sequences: int = 8, variants: Sequence[dict[str, Any]] = ({}, {"keep": 0}, {"waits": False})) -> tuple[int, float, list[float]]:
    """A step of several sequences at position 511, as a captured graph and as one kernel. Gives the bytes of the context, the milliseconds of the graph, and those of each variant."""
    from tilewright.mega.persistent.entry import PersistentStep

    shape = qwen_shape()
    g, inputs, nbytes = ready_step(torch, place, shape, sequences)
    context = 2 * 2 * shape.layers * sequences * (POSITION + 1) * shape.groups * shape.depth
    captured = g.capture("cuda", **inputs)
    wanted = torch.from_dlpack(captured()["logits"]).float().clone()
    graph_ms, found = median_ms(torch, captured.graph.replay), []
    print(f"batch {sequences}: weights {nbytes / 1e9:.2f} GB, context {context / 1e6:.0f} MB; captured graph {graph_ms:.3f} ms", flush=True)
    plan, kept = g.plan(token=(sequences,), position=(sequences,)), None
    for options in variants:
        start = time.perf_counter()
        made = PersistentStep(g.executor, plan, place, inputs, planned=kept, **options)
        kept, seconds = made.step, time.perf_counter() - start
        made.launch()
        torch.cuda.synchronize()
        error = float((torch.from_dlpack(made.outputs["logits"]).float() - wanted).abs().max())
        if options.get("waits", True) and not error < 0.25 * float(wanted.std()):
            raise RuntimeError(f"batch {sequences} {options}: logits are off by {error:.2g}, with a standard deviation of {float(wanted.std()):.2g}")
        found.append(median_ms(torch, made.launch))
        print(f"batch {sequences} {options}: {found[-1]:.3f} ms, made in {seconds:.1f} s, {made.waits} waits, logits off by {error:.2g}", flush=True)
        made.close()
    return context, graph_ms, found


def eight_billion(torch: Any, place: Any) -> tuple[int, float, float, float]:
    """A step of the shapes of an 8 B model, in bf16, against a copy of 4 GiB. Gives the bytes of the weights, TB/s of the copy, and milliseconds of the graph and of one kernel."""
    from bench.decode_step import example
    from tilewright.mega.persistent.entry import PersistentStep

    begin = time.perf_counter()
    shape = example().Shape(layers=32, wide=4096, heads=32, groups=8, depth=128, hidden=14336, words=128256, theta=5e5)
    g, inputs, nbytes = ready_step(torch, place, shape, shared_embedding=False)
    source = torch.empty(1 << 32, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    copied = 2 * source.numel() / median_ms(torch, functools.partial(target.copy_, source), 20) / 1e9
    print(f"8b: {nbytes / 1e9:.2f} GB of weights, ready after {time.perf_counter() - begin:.1f} s; a copy moves {copied:.2f} TB/s", flush=True)
    del source, target
    captured = g.capture("cuda", **inputs)
    wanted = torch.from_dlpack(captured()["logits"]).float().clone()
    graph_ms = median_ms(torch, captured.graph.replay, 50)
    print(f"8b: captured graph {graph_ms:.3f} ms, {nbytes / graph_ms / 1e9:.2f} TB/s, {nbytes / graph_ms / 1e9 / copied:.0%} of a copy", flush=True)
    made = PersistentStep(g.executor, g.plan(token=(1,), position=(1,)), place, inputs)
    made.launch()
    torch.cuda.synchronize()
    error = float((torch.from_dlpack(made.outputs["logits"]).float() - wanted).abs().max())
    ms = median_ms(torch, made.launch, 50)
    print(f"8b: persistent {ms:.3f} ms, {nbytes / ms / 1e9:.2f} TB/s, {nbytes / ms / 1e9 / copied:.0%} of a copy; logits off by {error:.2g}", flush=True)
    made.close()
    return nbytes, copied, graph_ms, ms


def small_step(place: Any, delays: int) -> Any:
    """A gated network as one kernel of three ops, whose blocks sleep now and then."""
    import tilewright as tw
    from tilewright.mega.persistent.entry import PersistentStep

    rng = np.random.default_rng(9)
    g = tw.TensorGraph("small")
    x = g.input("x", (1, 512), tw.f32)
    norm = g.op("RmsNorm", x, gamma=g.weight("gamma", np.ones(512, np.float32)), name="norm")
    gate, up, down = ((rng.standard_normal(e) / e[-1] ** 0.5).astype(np.float32) for e in ((1024, 512), (1024, 512), (512, 1024)))
    both = g.op("Mul", g.op("Silu", g.op("MulMat", norm, weight=g.weight("gate", gate))), g.op("MulMat", norm, weight=g.weight("up", up)))
    g.output("y", g.op("Add", x, g.op("MulMat", both, weight=g.weight("down", down))))
    given = place.runtime.from_numpy(rng.standard_normal((1, 512)).astype(np.float32))
    return PersistentStep(g.executor, g.plan(x=(1, 512)), place, {"x": given}, delays=delays, watchdog=20.0)


def soak(torch: Any, place: Any, limit: float) -> list[str]:
    """Launches until all are made or the time is up: the same bits each time, and counters that went on by as much. Gives what was made, a line for each kind."""
    begin, lines = time.perf_counter(), []
    for delays, wanted_launches in ((0, 2000), (2000, 1_000_000)):
        step = small_step(place, delays)
        step.launch()
        torch.cuda.synchronize()
        first, launches, wrong = step.outputs["y"].numpy().tobytes(), 1, 0
        start = said = time.perf_counter()
        while launches < wanted_launches and time.perf_counter() - begin < 0.55 * limit:
            for _ in range(1000):
                step.launch()
            launches += 1000
            torch.cuda.synchronize()
            wrong += step.outputs["y"].numpy().tobytes() != first
            if time.perf_counter() - said > 5:
                said = time.perf_counter()
                print(f"  {launches:,} launches, {wrong} looks with other bits", flush=True)
        made = int(step.counters.numpy()[1])
        lines.append(f"delays up to {delays} ns: {launches:,} launches of a small tape, {(time.perf_counter() - start) / launches * 1e6:.1f} us each, {wrong} looks with other bits, counted {made:,}")
        print(f"soak, {lines[-1]}", flush=True)
        step.close()
    from tilewright.mega.persistent.entry import PersistentStep

    g, inputs, _ = ready_step(torch, place, qwen_shape())
    big = PersistentStep(g.executor, g.plan(token=(1,), position=(1,)), place, inputs)
    big.launch()
    torch.cuda.synchronize()
    logits = torch.from_dlpack(big.outputs["logits"]).clone()
    steps, wrong, said = 1, 0, time.perf_counter()
    while steps < 20_000 and time.perf_counter() - begin < limit:
        for _ in range(200):
            big.launch()
        steps += 200
        torch.cuda.synchronize()
        wrong += not bool((torch.from_dlpack(big.outputs["logits"]) == logits).all())
        if time.perf_counter() - said > 5:
            said = time.perf_counter()
            print(f"  {steps:,} steps of 1.5 B weights, {wrong} looks with other bits", flush=True)
    lines.append(f"{steps:,} steps of 1.5 B weights, {'with' if big.ring.ops else 'without'} a ring, {wrong} looks with other bits, {time.perf_counter() - begin:.0f} s in all")
    print(f"soak: {lines[-1]}", flush=True)
    return lines


def gantt(torch: Any, place: Any, folder: str = "bench/results") -> None:
    """The picture of a real step beside the results, with its text."""
    from pathlib import Path

    import tilewright as tw
    from tilewright.mega.persistent.entry import PersistentStep
    from tilewright.mega.report import report_of

    g, inputs, _ = ready_step(torch, place, qwen_shape())
    made = PersistentStep(g.executor, g.plan(token=(1,), position=(1,)), place, inputs, clocks=True)
    for _ in range(5):
        made.launch()
    torch.cuda.synchronize()
    breakdown(made)
    report = report_of("Qwen2.5-1.5B shapes, bf16, a step at position 511", "nvidia-h200", made)
    stem = Path(folder) / f"mega-step-nvidia-h200-{time.strftime('%Y-%m-%d')}"
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".svg").write_text(tw.mega.gantt_svg(report), encoding="utf-8")
    stem.with_suffix(".txt").write_text(report.text(400) + "\n", encoding="utf-8")
    print(f"{stem}.svg: {len(report.times)} tasks, {stem.with_suffix('.svg').stat().st_size:,} bytes", flush=True)


def long_run(torch: Any, made: Any, steps: int = 2000) -> str:
    """Many launches give the same bits as the first."""
    made.launch()
    torch.cuda.synchronize()
    wanted = torch.from_dlpack(made.outputs["logits"]).clone()
    for _ in range(steps):
        made.launch()
    torch.cuda.synchronize()
    return f"{steps} launches: the same bits {bool((torch.from_dlpack(made.outputs['logits']) == wanted).all())}"


def main(quick: bool = False) -> None:
    torch: Any = importlib.import_module("torch")
    from tilewright.execute.devices import find_device

    place = find_device("cuda")
    begin = time.perf_counter()
    step, _, graph, ours = prepared_steps()
    print(f"prepared in {time.perf_counter() - begin:.1f} s", flush=True)
    wanted = torch.from_dlpack(step()["logits"]).float().clone()
    captured = median_ms(torch, step)
    graph.replay()
    print(f"captured graph {captured:.3f} ms, torch graph {median_ms(torch, graph.replay):.3f} ms", flush=True)
    variants: list[dict[str, Any]] = [{}, {"ring_bytes": 0}, {"waits": False}]
    if not quick:
        variants += [{"idle": 10 << 20}, {"idle": 16 << 20}, {"clocks": True}, {"threads": 512}, {"per_processor": 2, "threads": 256}, {"per_processor": 2, "threads": 256, "idle": 10 << 20}]
    kept: list[Any] = []
    for options in variants:
        if time.perf_counter() - begin > LIMIT:
            print("out of time")
            return
        try:
            made, seconds = step_of(ours, place, **options, **({"planned": kept[0]} if kept else {}))
            kept.append(made.step)
            made.launch()
            torch.cuda.synchronize()
            found = torch.from_dlpack(made.outputs["logits"]).float()
            error = float((found - wanted).abs().max())
            same = bool((torch.from_dlpack(made.outputs["next"]).reshape(-1) == wanted.argmax()).all())
            ms = median_ms(torch, made.launch)
            if made.clocks:
                breakdown(made)
            if not options:
                print(long_run(torch, made), flush=True)
            print(f"persistent {options}: {ms:.3f} ms, made in {seconds:.1f} s, {made.waits} waits, logits off by {error:.2g}, same token {same}", flush=True)
            made.close()
        except Exception as error:  # the table goes on
            print(f"persistent {options}: {type(error).__name__}: {str(error)[:600]}", flush=True)
            if "TW03" in str(error):
                return


def gpu_cases(quick: bool) -> list[Case]:
    """The step as one launch, as our captured graph, and as PyTorch's."""

    def prepare() -> Prepared:
        torch: Any = importlib.import_module("torch")
        from tilewright.execute.devices import find_device

        step, theirs, graph, ours = prepared_steps()
        made, _ = step_of(ours, find_device("cuda"))

        def persistent(slot: int) -> Any:
            made.launch()
            return made.outputs["logits"]

        def captured(slot: int) -> Any:
            return step()["logits"]

        def torch_graph(slot: int) -> Any:
            graph.replay()
            return theirs.result[0]

        torch_graph(0)
        torch.cuda.synchronize()
        wanted = theirs.result[0].float()

        def verify(slot: int, returned: Any, variant: Variant) -> str:
            found = returned if isinstance(returned, torch.Tensor) else torch.from_dlpack(returned)
            error = float((found.float().reshape(-1) - wanted.reshape(-1)).abs().max() / wanted.std())
            return "" if error < 0.25 else f"logits are off by {error:.2g} standard deviations"

        variants = [Variant(OURS, persistent, returns=True), Variant("our graph", captured, returns=True), Variant("torch graph", torch_graph, returns=True)]
        return Prepared(variants, lambda: None, verify, slots=1)

    nbytes = 2 * sum(int(np.prod(e)) for name, e in qwen_shape().weights().items() if name != "embed")
    return [Case("mega", (28, 1536, 8960, 151936), "bf16, position 511", nbytes, prepare, Bar(2.9))]


if __name__ == "__main__":
    from tilewright.execute.devices import find_device as found_device

    kind, given = next((a for a in sys.argv[1:] if a in ("gemma", "batch", "8b", "soak", "gantt")), ""), sys.argv[2:]
    if kind:
        torch_, place_ = importlib.import_module("torch"), found_device("cuda")
        if kind == "gemma":
            gemma(torch_, place_)
        elif kind == "batch":
            batch(torch_, place_, int(given[0]) if given else 8)
        elif kind == "8b":
            eight_billion(torch_, place_)
        elif kind == "soak":
            soak(torch_, place_, float(given[0]) if given else 120.0)
        else:
            gantt(torch_, place_, *given[:1])
    else:
        main("quick" in sys.argv)
