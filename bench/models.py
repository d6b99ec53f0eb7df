"""Models with random weights: text of Gemma's shapes, its prompt, the way to its first token, and a batch of sentences of an encoder.

In: whether to be quick, and the device. Out: one `Record` per row. Peers are llama.cpp (CPU, one and two threads; `pip install llama-cpp-python` builds it, and a run
without it says so), ONNX Runtime (CPU) and PyTorch (GPU). All read the same file, except for ONNX Runtime and PyTorch, which get the same weights.

Rows of generation are milliseconds a token. Their prompt is in the caches when the clock starts, for every variant. The row `prompt` checks logits after a few
tokens against llama.cpp's, where it is there; vectors of sentences are checked against the peer's. Text itself is not compared: with random weights the best words are close. `TILEWRIGHT_MODEL_FILES` names the folder of the files.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

import tilewright as tw
from bench.harness import OURS, Bar, LoadMeter, Record, Setting, summarise
from bench.model_files import encoder_file, gemma_file
from bench.onnx_models import encoder

THREADS = 2
PROMPT = 512
AT = (128, 448)
"""Positions where text begins."""
SENTENCES, LENGTH = 16, 128
FIRST = 8
"""Tokens of the prompt that the first token waits for."""
ROWS = ("prompt", "generate", "first-token", "encoder")
NEAR = 0.2
"""Logits may differ from llama.cpp's by so much of their size: both round activations to eight bits, each in its own way."""
Timed = Callable[[], float]
"""One sample, in milliseconds."""

FIRST_TOKEN = """
import sys, time
path, device, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
ids = [7 + 31 * n for n in range(count)]
if device == "llama.cpp":
    import llama_cpp
    start = time.perf_counter()
    model = llama_cpp.Llama(path, n_ctx=1024, verbose=False, n_threads=2, n_threads_batch=2)
    model.eval(ids)
else:
    import tilewright as tw
    if device == "cpu":
        tw.set_num_threads(2)
    start = time.perf_counter()
    model = tw.models.load(path, device=device, context=1024)
    next(model.generate_ids(ids, tokens=1))
print("seconds", time.perf_counter() - start)
"""


@dataclass
class ModelSession:
    """Files and loaded models of a run."""

    setting: Setting
    quick: bool
    device: str

    def __post_init__(self) -> None:
        self.folder = Path(os.environ.get("TILEWRIGHT_MODEL_FILES") or Path(tempfile.gettempdir()) / "tilewright-model-files")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.rounds = 2 if self.quick else 7
        self.ids = [int(i) for i in np.random.default_rng(3).integers(300, 262000, PROMPT)]
        self.notes: list[str] = []
        if self.device == "cpu":
            tw.set_num_threads(THREADS)
            if not has_llama():
                self.notes.append("llama.cpp is not installed, no row is compared with it: pip install llama-cpp-python")
        else:
            self.notes.append("llama.cpp has no part in rows of GPUs")

    @cached_property
    def gemma_path(self) -> Path:
        return gemma_file(self.folder / "gemma-shapes.gguf")

    @cached_property
    def gemma(self) -> Any:
        return tw.models.load(self.gemma_path, device=self.device, context=1024)

    @cached_property
    def llamas(self) -> dict[str, Any]:
        """llama.cpp with one thread and with two; the better one is the peer."""
        if self.device != "cpu" or not has_llama():
            return {}
        library = importlib.import_module("llama_cpp")
        return {
            f"llama.cpp, {threads} thread{'s' * (threads > 1)}": library.Llama(str(self.gemma_path), n_ctx=1024, n_batch=PROMPT, verbose=False, n_threads=threads, n_threads_batch=threads)
            for threads in ((THREADS,) if self.quick else (1, THREADS))
        }

    # -- rows ---------------------------------------------------------------------------------------------------

    def records(self, row: str) -> Iterator[Record]:
        if row == "generate":
            for at in AT:
                yield self._record(row, [at], lambda at=at: self._generate(at), Bar(1.5), 1000 / 3000)  # type: ignore[misc]
        elif row == "prompt":
            yield self._record(row, [PROMPT], self._prompt, Bar(1.2), None)
        elif row == "first-token":
            yield self._record(row, [FIRST], self._first_token, None, 1500.0)
        else:
            yield self._record(row, [SENTENCES, LENGTH], self._encoder, Bar(1.0 if self.device == "cpu" else 1.2), None)

    def _record(self, op: str, shape: list[int], prepare: Callable[[], dict[str, Timed]], bar: Bar | None, bar_ms: float | None) -> Record:
        dtype = "f32" if op == "encoder" else "q4_k_m"
        record = Record(op, shape, dtype, self.setting.device, commit=self.setting.commit, date=self.setting.date, notes=list(self.notes))
        if self.device != "cpu" or op == "first-token":
            record.bar_ms = bar_ms
        try:
            variants = prepare()
            samples: dict[str, list[float]] = {name: [] for name in variants}
            meter = LoadMeter()
            for number in range(self.rounds):
                names = list(variants)
                for name in (*names[number % len(names) :], *names[: number % len(names)]):
                    samples[name].append(variants[name]())
            record.load = meter.read()
        except Exception as error:  # reported, and the other rows still run
            record.error = f"{type(error).__name__}: {str(error).strip()[:600]}"
            return record
        summarise(record, samples, 0, bar)
        if op in ("generate", "prompt"):
            each = 1 if op == "generate" else PROMPT
            said = ", ".join(f"{name} {each * 1e3 / ms:.0f}" for name, ms in ({OURS: record.ours_ms or 0.0} | record.peers).items() if ms)
            record.notes.append(f"{op} {shape[0]}, tokens a second: {said}")
        return record

    def _generate(self, at: int) -> dict[str, Timed]:
        """Milliseconds a token."""
        model, ids, count = self.gemma, self.ids[:at], 256 if self.device != "cpu" else 24 if self.quick else 64
        list(model.generate_ids(ids, tokens=2))  # the prompt is in the caches, and the step is captured
        fed = list(model.generate_ids(ids, tokens=count + 1))
        if len(fed) != count + 1:
            raise RuntimeError(f"{len(fed)} tokens of {count + 1} were made")

        def ours() -> float:
            list(model.generate_ids(ids, tokens=count + 1))
            return 1e3 / float(model.stats.rate)

        def theirs(llama: Any) -> float:
            llama.n_tokens = at
            llama.eval(fed[:1])
            start = time.perf_counter()
            for token in fed[:count]:
                llama.eval([token])
            return (time.perf_counter() - start) * 1e3 / count

        for llama in self.llamas.values():
            llama.n_tokens = 0
            llama.eval(ids)
        return {OURS: ours} | {name: partial(theirs, llama) for name, llama in self.llamas.items()}

    def _prompt(self) -> dict[str, Timed]:
        model = self.gemma

        def ours() -> float:
            model.generator.known.clear()
            start = time.perf_counter()
            list(model.generate_ids(self.ids, tokens=1))
            return (time.perf_counter() - start) * 1e3

        def theirs(llama: Any) -> float:
            llama.n_tokens = 0
            start = time.perf_counter()
            llama.eval(self.ids)
            return (time.perf_counter() - start) * 1e3

        for llama in self.llamas.values():
            self._check_logits(llama)
        ours()
        return {OURS: ours} | {name: partial(theirs, llama) for name, llama in self.llamas.items()}

    def _check_logits(self, llama: Any) -> None:
        ids = self.ids[:FIRST]
        found = self.gemma.logits(ids)[-1]
        llama.n_tokens = 0
        llama.eval(ids)
        wanted = np.ctypeslib.as_array(llama._ctx.get_logits_ith(-1), (self.gemma.words,))
        error = float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
        if not error < NEAR:
            raise RuntimeError(f"logits differ from llama.cpp's by {error:.2e} of their size, where {NEAR} is allowed")

    def _first_token(self) -> dict[str, Timed]:
        # Modules are compiled to bytecode once, as they are wherever Python may write it.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | {"PYTHONPYCACHEPREFIX": str(self.folder / "bytecode")}

        def child(device: str) -> float:
            done = subprocess.run([sys.executable, "-c", FIRST_TOKEN, str(self.gemma_path), device, str(FIRST)], capture_output=True, text=True, check=False, env=environment)
            if done.returncode:
                raise RuntimeError(f"the process of {device} failed: {done.stderr.strip()[-300:]}")
            return float(done.stdout.split("seconds")[-1]) * 1e3

        child(self.device)  # kernels come to the cache, and the file to the page cache
        return {OURS: lambda: child(self.device)} | ({"llama.cpp": lambda: child("llama.cpp")} if self.device == "cpu" and has_llama() else {})

    # -- sentences ----------------------------------------------------------------------------------------------

    def _encoder(self) -> dict[str, Timed]:
        model = tw.models.load(encoder_file(self.folder / "encoder.gguf"), device=self.device)
        ids = np.random.default_rng(4).integers(5, 30000, (SENTENCES, LENGTH)).astype(np.int32)
        vectors = model.embed(ids.tolist())
        step = model.step(SENTENCES, LENGTH, True)
        weights = {name: np.array(model.file.array(name)) for name in model.file.tensors}
        if self.device == "cpu":
            lengths = np.full(SENTENCES, LENGTH, np.int32)
            session, inputs = onnx_session(weights), {"tokens": ids.astype(np.int64), "mask": np.ones(ids.shape, np.int64)}
            pooled = session.run(None, inputs)[0].mean(1)
            check_vectors(vectors, pooled / np.linalg.norm(pooled, axis=1, keepdims=True))
            return {OURS: timed(lambda: step(ids=ids, lengths=lengths)), "onnxruntime": timed(lambda: session.run(None, inputs))}
        half = tw.models.load(model.file.path, device=self.device, cache=tw.f16)  # attention of f16, which matrix units take
        check_vectors(half.embed(ids.tolist()), vectors, 1e-3)
        steps = {OURS: step, f"{OURS}, cache=f16": half.step(SENTENCES, LENGTH, True)}
        return self._torch_encoder(steps, weights, ids, vectors)

    def _torch_encoder(self, steps: dict[str, Any], weights: dict[str, np.ndarray], ids: np.ndarray, vectors: np.ndarray) -> dict[str, Timed]:
        torch = importlib.import_module("torch")
        torch.set_grad_enabled(False)
        network = torch_encoder(torch, {name: torch.as_tensor(array, device="cuda") for name, array in weights.items()})
        given = torch.as_tensor(ids.astype(np.int64), device="cuda")
        check_vectors(vectors, network(given).cpu().numpy())
        calls: dict[str, Callable[[], Any]] = {name: step.graph.replay for name, step in steps.items()} | {"torch": lambda: network(given)}
        if not self.quick:
            compiled = torch.compile(network, mode="reduce-overhead")
            for _ in range(3):
                compiled(given)
            calls["torch.compile"] = lambda: compiled(given)

        def several(call: Callable[[], Any]) -> float:
            call()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(20):
                call()
            torch.cuda.synchronize()
            return (time.perf_counter() - start) * 50

        return {name: partial(several, call) for name, call in calls.items()}


def has_llama() -> bool:
    return importlib.util.find_spec("llama_cpp") is not None


def timed(call: Callable[[], Any]) -> Timed:
    def sample() -> float:
        call()
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3

    return sample


def check_vectors(found: np.ndarray, wanted: np.ndarray, near: float = 1e-4) -> None:
    error = float(np.abs(found - wanted).max())
    if not error < near:
        raise RuntimeError(f"vectors differ from the peer's by {error:.2e}")


def onnx_session(weights: dict[str, np.ndarray]) -> Any:
    """The encoder of a file in ONNX Runtime."""
    runtime = importlib.import_module("onnxruntime")
    given = {"words": weights["token_embd.weight"], "positions": weights["position_embd.weight"] + weights["token_types.weight"][0]}
    given |= {"embedding.gamma": weights["token_embd_norm.weight"], "embedding.beta": weights["token_embd_norm.bias"]}
    parts = {"query": "attn_q", "key": "attn_k", "value": "attn_v", "output": "attn_output", "up": "ffn_up", "down": "ffn_down"}
    layers = sum(name.endswith("attn_q.weight") for name in weights)
    for n in range(layers):
        for part, own in parts.items():
            given[f"layer{n}.{part}.w"], given[f"layer{n}.{part}.b"] = np.ascontiguousarray(weights[f"blk.{n}.{own}.weight"].T), weights[f"blk.{n}.{own}.bias"]
        for norm, own in (("norm", "attn_output_norm"), ("norm2", "layer_output_norm")):
            given[f"layer{n}.{norm}.gamma"], given[f"layer{n}.{norm}.beta"] = weights[f"blk.{n}.{own}.weight"], weights[f"blk.{n}.{own}.bias"]
    options = runtime.SessionOptions()
    options.intra_op_num_threads = THREADS
    return runtime.InferenceSession(encoder(layers, given=given), options)


def torch_encoder(torch: Any, w: dict[str, Any]) -> Callable[[Any], Any]:
    """The encoder of a file in PyTorch."""
    functional = torch.nn.functional
    width, layers = w["token_embd.weight"].shape[1], sum(name.endswith("attn_q.weight") for name in w)

    def linear(x: Any, name: str) -> Any:
        return functional.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    def norm(x: Any, name: str) -> Any:
        return functional.layer_norm(x, (width,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-12)

    def network(ids: Any) -> Any:
        sentences, tokens = ids.shape
        x = norm(w["token_embd.weight"][ids] + w["position_embd.weight"][:tokens] + w["token_types.weight"][0], "token_embd_norm")
        for n in range(layers):
            at = f"blk.{n}"
            q, k, v = (linear(x, f"{at}.attn_{part}").view(sentences, tokens, 12, width // 12).transpose(1, 2) for part in "qkv")
            mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(sentences, tokens, width)
            x = norm(x + linear(mixed, f"{at}.attn_output"), f"{at}.attn_output_norm")
            x = norm(x + linear(functional.gelu(linear(x, f"{at}.ffn_up")), f"{at}.ffn_down"), f"{at}.layer_output_norm")
        return functional.normalize(x.mean(1), dim=-1)

    return network
