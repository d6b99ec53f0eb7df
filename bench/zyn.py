"""ZynML programs: what they cost beside the same kernels written in Python, how fast they are checked, and what calling them again costs.

In: the programs of examples/zyn; out: one `Record` per row. `zyn-cpu` runs on NumPy arrays, `zyn` on a GPU with times of the device. A row of a
program has the Python kernel of `zyn_kernels.py` as its peer, in turns, and its bar is 0.97 of it. Rows of tools have a bar in time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import tilewright as tw
from bench import zyn_kernels as kernels
from bench.harness import (
    OURS,
    Bar,
    Case,
    Clock,
    HostClock,
    Plan,
    Prepared,
    Record,
    Setting,
    Variant,
    measure,
    summarise,
)

EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "zyn"
BLOCK = EXAMPLES / "transformer_block.zyn"
PYTHON = "python kernel"
CHECK_MS = 300.0
LINES, LINES_MS = 10_000, 6000.0
CALL_MS = 0.005
"""What a call made again may cost beside its launches."""
GPU_BLOCK_MS = 0.2
Inputs = Callable[[int], dict[str, Any]]


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape, dtype=np.float32)


@dataclass(frozen=True)
class Example:
    """A program of one block: the Python kernel that is the same, and inputs for a size (1 for a CPU, 8 for a GPU)."""

    name: str
    kernel: Any
    inputs: Inputs


def _heads(n: int) -> dict[str, Any]:
    return {name: normal(1, 4 * n, 256 * (1 if n == 1 else 4), 64) for name in "QKV"}


def _masked(n: int) -> dict[str, Any]:
    given = _heads(n)
    seq = given["Q"].shape[2]
    return given | {"mask": np.tril(np.ones((seq, seq), bool))}


def _rows(n: int) -> np.ndarray:
    return normal(1024 * n, 2048)


def _turned(n: int) -> dict[str, Any]:
    angles = np.arange(512 * 32, dtype=np.float32).reshape(512, 32) / 97
    return {"x": normal(n, 16, 512, 64), "cosines": np.cos(angles), "sines": np.sin(angles)}


ROWS = [
    Example("argmax", kernels.argmax, lambda n: {"data": normal(n << 21)}),
    Example("axpy", kernels.axpy, lambda n: {"a": 1.5, "x": normal(n << 21), "y": normal(n << 21)}),
    Example("batched_matmul", kernels.batched_matmul, lambda n: {"a": normal(8, 128 * n, 256), "b": normal(8, 128 * n, 256)}),
    Example("conv2d", kernels.conv2d, lambda n: {"image": normal(2 * n, 32, 64, 64), "weights": normal(64, 32, 3, 3), "bias": normal(64)}),
    Example("conv2d_depthwise", kernels.depthwise, lambda n: {"image": normal(2 * n, 32, 128, 128), "windows": normal(32, 3, 3)}),
    Example("cross_entropy", kernels.cross_entropy, lambda n: {"scores": _rows(n), "label": np.arange(1024 * n, dtype=np.int32) % 2048}),
    Example("flash_attention", kernels.flash, _heads),
    Example("layer_norm", kernels.layer_norm, lambda n: {"x": _rows(n), "gain": normal(2048), "shift": normal(2048)}),
    Example("masked_attention", kernels.attention, _masked),
    Example("matmul", kernels.matmul, lambda n: {"a": normal(256 * n, 512), "b": normal(512, 256 * n)}),
    Example("max", kernels.largest, lambda n: {"data": normal(n << 21)}),
    Example("norm", kernels.norm, lambda n: {"data": normal(n << 21)}),
    Example("relu", kernels.relu, lambda n: {"x": normal(n << 21)}),
    Example("rms_norm", kernels.rms_norm, lambda n: {"x": _rows(n), "gain": normal(2048)}),
    Example("rope", kernels.rope, _turned),
    Example("row_sums", kernels.row_sums, lambda n: {"matrix": _rows(n)}),
    Example("scale", kernels.scale, lambda n: {"matrix": _rows(n), "vector": normal(2048)}),
    Example("softmax", kernels.softmax, lambda n: {"x": _rows(n)}),
    Example("sum", kernels.total, lambda n: {"data": normal(n << 21)}),
]


class Place:
    """Where rows run: the CPU, or the first GPU."""

    def __init__(self, setting: Setting, quick: bool, gpu: bool) -> None:
        self.setting, self.quick, self.gpu = setting, quick, gpu
        self.clock: Clock = HostClock()
        self.plan = Plan(9, 3, 2, 2.0) if quick else Plan(31, 3, 3, 8.0)
        if gpu:
            from bench.gpu import EventClock

            self.clock = EventClock()

    def array(self, value: Any) -> Any:
        return tw.to_device(value, "cuda:0") if self.gpu and isinstance(value, np.ndarray) else value

    def record(self, op: str, shape: tuple[int, ...] = (), dtype: str = "f32") -> Record:
        return Record(op, list(shape), dtype, self.setting.device, commit=self.setting.commit, date=self.setting.date)

    def synchronize(self) -> None:
        if self.gpu:
            import torch

            torch.cuda.synchronize()


def _host(value: Any) -> np.ndarray:
    return np.asarray(value.numpy() if hasattr(value, "numpy") else value, np.float64)


# -- programs ---------------------------------------------------------------------------------------------------------


def example_row(example: Example, place: Place) -> Record:
    """A program against its kernel."""
    inputs = example.inputs(8 if place.gpu else 1)
    shape = max((v.shape for v in inputs.values() if isinstance(v, np.ndarray)), key=np.prod)
    nbytes = sum(v.nbytes for v in inputs.values() if isinstance(v, np.ndarray))
    case = Case(example.name, shape, "f32", nbytes, lambda: _prepared(example, inputs, place), Bar(0.97, (PYTHON,)))
    return measure(case, place.clock, place.plan, place.setting)


def _prepared(example: Example, inputs: Mapping[str, Any], place: Place) -> Prepared:
    given = {name: place.array(value) for name, value in inputs.items()}
    module = tw.load(EXAMPLES / f"{example.name}.zyn")
    values = tuple(given.values())
    wanted = _host(example.kernel(*(v.astype(np.float64) if isinstance(v, np.ndarray) and v.dtype == np.float32 else v for v in inputs.values())))
    for _ in range(3):
        (_,) = module.run(**given).values()
    (name,) = module.run(**given)

    def verify(slot: int, returned: Any, variant: Variant) -> str:
        found = _host(returned[name] if variant.name == OURS else returned)
        if found.shape != wanted.shape:
            return f"shape {found.shape}, expected {wanted.shape}"
        worst = float(np.abs(found - wanted).max())
        bound = 1e-4 * max(1.0, float(np.abs(wanted).max()))
        return "" if worst <= bound else f"off by {worst:.3g}, more than {bound:.3g}"

    variants = [Variant(OURS, lambda _: module.run(**given), True), Variant(PYTHON, lambda _: example.kernel(*values), True)]
    # Short calls are timed together: those of a GPU are microseconds, and a clock of the host is not steady below some.
    return Prepared(variants, lambda: None, verify, batch=20 if place.gpu else 5)


# -- the transformer block --------------------------------------------------------------------------------------------


def block_row(place: Place) -> Record:
    """The block as a pipeline, beside PyTorch eager and, on a GPU, its CUDA graph. The notes say how many launches a call makes."""
    batch, seq, heads, width, inner = (8, 512, 12, 64, 3072) if place.gpu else (1, 128, 12, 64, 3072)
    shape, dtype = (batch, seq, heads * width, heads, inner), "bf16" if place.gpu else "f32"
    bar = None if place.gpu else Bar(1.0, ("torch",))
    prepared: list[Prepared] = []

    def prepare() -> Prepared:
        prepared.append(_block(place, shape, dtype))
        return prepared[0]

    record = measure(Case("transformer_block", shape, dtype, 0, prepare, bar), place.clock, place.plan, place.setting)
    record.bar_ms = GPU_BLOCK_MS if place.gpu else None
    return record


def _block(place: Place, shape: tuple[int, ...], dtype: str) -> Prepared:
    import torch

    batch, seq, hidden, heads, inner = shape
    device, stored = ("cuda" if place.gpu else "cpu"), torch.bfloat16 if dtype == "bf16" else torch.float32
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    sizes = {
        "qkv_proj": (hidden, 3 * hidden), "out_proj": (hidden, hidden), "ln1_weight": (hidden,), "ln1_bias": (hidden,),
        "ffn_up": (hidden, inner), "ffn_down": (inner, hidden), "ln2_weight": (hidden,), "ln2_bias": (hidden,),
    }  # fmt: skip
    weights = {n: (torch.randn(s) / (s[0] ** 0.5 if len(s) > 1 else 1)).to(device, stored) for n, s in sizes.items()}
    x = torch.randn(batch, seq, hidden).to(device, stored)
    own = _own if place.gpu else (lambda t: t.numpy())
    model, array = {"layers": [{n: own(w) for n, w in weights.items()}]}, own(x)
    module = tw.load(BLOCK)

    def ours(_: int) -> Any:
        return module.transformer_block(array, 0, model=model, num_heads=heads, head_dim=hidden // heads)

    def eager(_: int) -> torch.Tensor:
        return _torch_block(x, weights, heads)

    wanted = _torch_block(x.double(), {n: w.double() for n, w in weights.items()}, heads).cpu().numpy()
    for _ in range(3):
        ours(0)
    variants = [Variant(OURS, ours, True), Variant("torch", eager, True)]
    notes: tuple[str, ...] = (f"transformer_block: {_launches(module)} launches a call",)
    if place.gpu:
        graph, captured = _torch_graph(eager)
        variants.append(Variant("torch CUDA graph", lambda _: (graph.replay(), captured)[1], True))

    def verify(slot: int, returned: Any, variant: Variant) -> str:
        found = returned.double().cpu().numpy() if isinstance(returned, torch.Tensor) else _host(returned)
        worst = float(np.abs(found - wanted).max())
        bound = 0.25 if dtype == "bf16" else 1e-3
        return "" if worst <= bound else f"off by {worst:.3g}, more than {bound:.3g}"

    return Prepared(variants, lambda: None, verify, batch=4 if place.gpu else 1, notes=notes)


def _own(tensor: Any) -> Any:
    """An array of ours in the memory of a tensor."""
    from tilewright.runtime.cuda import device as cuda

    return cuda.devices()[0].wrap(tensor)


def _torch_block(x: Any, w: Mapping[str, Any], heads: int) -> Any:
    from torch.nn import functional

    batch, seq, hidden = x.shape
    q, k, v = (x @ w["qkv_proj"]).view(batch, seq, 3, heads, -1).permute(2, 0, 3, 1, 4)
    mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, seq, hidden)
    seen = functional.layer_norm(x + mixed @ w["out_proj"], (hidden,), w["ln1_weight"], w["ln1_bias"], 1e-6)
    wider = functional.gelu(seen @ w["ffn_up"], approximate="tanh")
    return functional.layer_norm(seen + wider @ w["ffn_down"], (hidden,), w["ln2_weight"], w["ln2_bias"], 1e-6)


def _torch_graph(run: Callable[[int], Any]) -> tuple[Any, Any]:
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run(0)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(0)
    return graph, captured


def _launches(module: Any) -> str:
    """How many kernels a replayed call launches."""
    for calls in (r for m in module._calls.values() for r in m._repeated.values()):
        for replay in calls.replays:
            names = replay.__globals__
            if "replay_graph" in names:
                return f"1 graph of {names['replay_graph'].__self__.nodes}"
            count = sum(name[0] == "k" and name[1:].isdigit() for name in names)
            return f"{count} calls of machine code, for all their"
    return "unknown"


# -- tools ------------------------------------------------------------------------------------------------------------


def check_row(place: Place) -> Record:
    """`tilewright check` of the block, a process from start to finish."""
    record = place.record("check", (), "")
    command = [sys.executable, "-m", "tilewright.cli.main", "check", str(BLOCK)]
    # Python keeps compiled modules, as it does for everybody who does not forbid it.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryDirectory() as folder:
        environment["PYTHONPYCACHEPREFIX"] = folder
        environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
        times: list[float] = []
        for turn in range(6 if place.quick else 21):
            start = time.perf_counter()
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            times += [(time.perf_counter() - start) * 1e3] if turn else []
            if done.returncode:
                record.error = done.stderr[-600:]
                return record
    summarise(record, {OURS: times}, 0, None)
    record.bar_ms = CHECK_MS
    return record


_LONG = """\
let y{0} = compute(x{1}) {{
    @kernel elementwise
    for i in 0..rows, j in 0..cols:
        let t = x{1}[i, j] * {0}.0 + 1.0
        let u = t if t > 0 else exp(t)
        out[i, j] = u * u
}}
let z{0} = y{0} + 1
fn f{0}(a, b): return a * b + {0}
let w{0} = f{0}(z{0}, y{0})
"""


def lines_row(place: Place) -> Record:
    """A file of ten thousand lines, parsed and checked."""
    from tilewright.cli.commands.check import check

    record = place.record("check_lines", (LINES,), "")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "long.zyn"
        path.write_text("".join(_LONG.format(n, n % 7) for n in range(LINES // 10)), encoding="utf-8")
        times: list[float] = []
        for _ in range(1 if place.quick else 3):
            start = time.perf_counter()
            with open(os.devnull, "w") as nowhere, _output_to(nowhere):
                right = check([str(path)], "", False)
            times.append((time.perf_counter() - start) * 1e3)
            if not right:
                record.error = "the file is said to be wrong"
    summarise(record, {OURS: times}, 0, None)
    record.bar_ms = LINES_MS
    return record


def _output_to(file: Any) -> Any:
    from contextlib import redirect_stdout

    return redirect_stdout(file)


def second_call_row(place: Place) -> Record:
    """What a pipeline of three launches called again costs beside them: tiny products, which do not become one kernel."""
    record = place.record("second_call", (3,), "f32")
    text = "pipeline steps(x, w: record):\n"
    for n in range(3):
        name = f"y{n}" if n else "x"
        text += f"    let y{n + 1} = compute({name}, w.gain) {{\n        for i in 0..rows, j in 0..cols:\n            var sum = 0.0\n"
        text += f"            for k in 0..cols:\n                sum += {name}[i, k] * w.gain[k, j]\n            out[i, j] = sum\n    }}\n"
    module = tw.load(text + "    return y3\n")
    x, gain = place.array(normal(4, 8)), place.array(normal(8, 8))
    weights = {"gain": gain}
    for _ in range(4):
        found = module.steps(x, weights)
    made = [_product() for _ in range(3)]
    first, second, third = made

    def by_hand() -> Any:
        return third(second(first(x, gain), gain), gain)

    if not np.allclose(_host(by_hand()), _host(found), rtol=1e-5):
        record.error = "the pipeline's result is wrong"
        return record
    loops: dict[str, Callable[[], Any]] = {OURS: lambda: module.steps(x, weights), "launches alone": by_hand}
    if place.gpu:
        loops["launches alone"] = _graph_launch(module)
    samples: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(20 if place.quick else 60):
        for name, call in loops.items():
            place.synchronize()
            start = time.perf_counter()
            for _ in range(200):
                call()
            samples[name].append((time.perf_counter() - start) * 1e3 / 200)
    summarise(record, samples, 0, None)
    whole, alone = min(samples[OURS]), min(samples["launches alone"])
    record.notes.append(f"second_call: {whole * 1e3:.2f} us a call, of which {alone * 1e3:.2f} us are launches; ours is the rest")
    record.ours_ms = record.ours_min_ms = max(0.0, whole - alone)
    record.ratio = record.ratio_min = None
    record.bar_ms = CALL_MS
    return record


def _product() -> Any:
    @tw.kernel
    def product(m: tw.Array, v: tw.Array) -> tw.Array:
        rows, cols = m.shape
        out = tw.empty((rows, cols), m.dtype)
        for i, j in tw.grid(rows, cols):
            total = 0.0
            for k in range(cols):
                total += m[i, k] * v[k, j]
            out[i, j] = total
        return out

    return product


def _graph_launch(module: Any) -> Callable[[], Any]:
    """The driver's launch of the pipeline's graph, with nothing around it."""
    calls = next(r for m in module._calls.values() for r in m._repeated.values() if r.replays)
    names = calls.replays[0].__globals__
    if "replay_graph" not in names:
        raise RuntimeError(f"the pipeline was not captured: {calls.obstacle}")
    ported = names["replay_graph"].__self__
    executable = next(iter(ported._ready.values()))
    return lambda: ported._launch(executable, 0)


TOOLS: Mapping[str, Callable[[Place], Record]] = {
    "transformer_block": block_row, "check": check_row, "check_lines": lines_row, "second_call": second_call_row,
}  # fmt: skip


def rows(place: Place) -> Iterator[tuple[str, Callable[[], Record]]]:
    """Every row: its name, and what measures it."""
    for example in ROWS:
        yield example.name, lambda example=example: example_row(example, place)  # type: ignore[misc]
    for name, row in TOOLS.items():
        if not (place.gpu and name in ("check", "check_lines")):
            yield name, lambda row=row: row(place)  # type: ignore[misc]
