"""ONNX models on a CPU against ONNX Runtime, two threads each: an encoder with random weights, and what `ONNX_MODELS` names.

In: whether to be quick. Out: cases whose peer is ONNX Runtime. `ONNX_MODELS` is a list of files with `:` between them; inputs are random, named sizes of
theirs are 1 unless `ONNX_SIZES` says otherwise (`batch=1,sequence=576`), integers are small.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import tilewright as tw
from bench.harness import OURS, Bar, Case, Prepared, Variant
from bench.onnx_models import encoder

THREADS = 2
TOLERANCE = 1e-4
"""The largest difference to ONNX Runtime's results, relative to the largest of them."""


def cases(quick: bool) -> list[Case]:
    tw.set_num_threads(THREADS)
    layers = 1 if quick else 6
    found = [_case(f"encoder-{layers}-layers", lambda: encoder(layers), (1, 128), _tokens)]
    for path in filter(None, os.environ.get("ONNX_MODELS", "").split(":")):
        found.append(_case(Path(path).stem, lambda path=path: Path(path).read_bytes(), (), _random))  # type: ignore[misc]
    return found


def _tokens(model: tw.OnnxGraph) -> dict[str, Any]:
    return {"tokens": np.random.default_rng(1).integers(0, 1000, (1, 128)), "mask": np.ones((1, 128), np.int64)}


def _random(model: tw.OnnxGraph) -> dict[str, Any]:
    sizes = dict(part.split("=") for part in os.environ.get("ONNX_SIZES", "").split(",") if part)
    generator = np.random.default_rng(1)
    found: dict[str, Any] = {}
    for name, value in model.inputs.items():
        shape = tuple(d if isinstance(d, int) else int(sizes.get(f"{name}.{axis}", sizes.get(str(d), 1))) for axis, d in enumerate(value.dims or ()))
        if value.dtype.kind == "f":
            found[name] = (generator.standard_normal(shape) * 0.1).astype(value.dtype)
        else:
            found[name] = np.full(shape, int(sizes[name]), value.dtype) if name in sizes else generator.integers(0, 2, shape).astype(value.dtype)
    return found


def _case(name: str, read: Callable[[], bytes], shape: tuple[int, ...], make: Callable[[tw.OnnxGraph], dict[str, Any]]) -> Case:
    def prepare() -> Prepared:
        runtime = importlib.import_module("onnxruntime")
        data = read()
        model = tw.graph.from_onnx(data)
        options = runtime.SessionOptions()
        options.intra_op_num_threads = THREADS
        session = runtime.InferenceSession(data, options)
        inputs = make(model)
        wanted = session.run(None, inputs)
        size = max(float(np.abs(w).max()) for w in wanted if w.size) or 1.0

        def verify(slot: int, returned: object, variant: Variant) -> str:
            results: dict[str, Any] = returned if isinstance(returned, dict) else {model.outputs[0]: returned}
            error = max(float(np.abs(results[n].astype(np.float64) - w).max()) for n, w in zip(model.outputs, wanted, strict=True))
            return "" if error <= TOLERANCE * size else f"differs by {error:.2e}, where {TOLERANCE * size:.2e} is allowed"

        variants = [
            Variant(OURS, lambda slot: model.run(inputs), returns=True),
            Variant("onnxruntime", lambda slot: dict(zip(model.outputs, session.run(None, inputs), strict=True)), returns=True),
        ]
        return Prepared(variants, lambda: None, verify)

    return Case(name, shape, "f32", 0, prepare, Bar(1.0, ("onnxruntime",)))
