"""Whole models: an encoder against ONNX Runtime, the fuzzer's first steps, the page about operators."""

from __future__ import annotations

import numpy as np
import pytest
from bench.onnx_models import encoder
from tools.fuzz_onnx import fuzz
from tools.onnx_table import PAGE, page

import tilewright as tw


def test_encoder_against_onnx_runtime() -> None:
    runtime = pytest.importorskip("onnxruntime")
    data = encoder(layers=2, width=24, heads=3, inner=40, vocabulary=50)
    model, session = tw.graph.from_onnx(data), runtime.InferenceSession(data)
    for batch, length in ((1, 7), (2, 5)):
        inputs = {"tokens": np.arange(batch * length).reshape(batch, length), "mask": np.ones((batch, length), np.int64)}
        inputs["mask"][:, -2:] = 0
        np.testing.assert_allclose(model.run(inputs), session.run(None, inputs)[0], rtol=1e-4, atol=1e-5)


def test_second_runs_are_the_first() -> None:
    data = encoder(layers=1, width=8, heads=2, inner=12, vocabulary=9)
    model = tw.graph.from_onnx(data)
    inputs = {"tokens": np.array([[1, 2, 3]]), "mask": np.ones((1, 3), np.int64)}
    first = model.run(inputs)
    for _ in range(2):
        np.testing.assert_array_equal(model.run(inputs), first)
    np.testing.assert_array_equal(model.run({name: np.repeat(array, 2, 0)[::2] for name, array in inputs.items()}), first)
    np.testing.assert_array_equal(model.run(inputs, fuse=False).shape, first.shape)


def test_replaced_kernels_are_used_at_once() -> None:
    model = tw.graph.from_onnx(PAGE.parents[1] / "examples/onnx/classifier.onnx")
    x = np.ones((2, 4), np.float32)
    before = model.run(x=x)
    model.run(x=x)
    graph = model.graph(x=x)
    name = next(n.name for n in graph.nodes.values() if n.name.startswith("Softmax"))
    graph.replace("Loops", lambda x0: np.zeros_like(x0), node=name)
    assert not model.run(x=x).any()
    graph.replace("Loops", None, node=name)
    np.testing.assert_array_equal(model.run(x=x), before)


def test_first_steps_of_the_fuzzer() -> None:
    counts, failures, _ = fuzz(20.0, 150, verbose=False)
    assert not failures, failures[0]
    assert sum(counts.values()) > 20


def test_the_page_lists_all_operators() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text, "python tools/onnx_table.py --write"
