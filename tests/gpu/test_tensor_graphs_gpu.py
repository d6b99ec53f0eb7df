"""Tensor graphs on a real GPU: a decode step against float64, replays against runs, bit for bit. Skipped where there is none."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tilewright as tw

pytestmark = pytest.mark.requires("cuda")


def example() -> Any:
    if "decode_graph" not in sys.modules:
        path = Path(__file__).parents[2] / "examples" / "decode_graph.py"
        spec = importlib.util.spec_from_file_location("decode_graph", path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules["decode_graph"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["decode_graph"])
    return sys.modules["decode_graph"]


@pytest.mark.parametrize("more", [{}, {"wide": 128, "heads": 8, "groups": 2, "depth": 64, "hidden": 320, "words": 257, "layers": 3}])
def test_a_decode_step_is_right_and_replays_equal_runs(more: dict[str, int]) -> None:
    module = example()
    shape = module.Shape(**more)
    weights = module.make_weights(shape, np.random.default_rng(1))
    tokens = [3, 14, 15, 9, 2, 6]
    wanted = module.reference(shape, weights, tokens)
    replayed = module.decode(module.build(shape, weights), tokens, "cuda", 16)
    eager = module.build(shape, weights, longest=16)
    for position, token in enumerate(tokens):
        ran = eager.run(device="cuda", token=np.array([token], np.int32), position=np.array([position], np.int32))
        assert np.array_equal(np.asarray(ran["logits"], np.float64).reshape(-1), replayed[position])
        assert np.abs(replayed[position] - wanted[position]).max() < 2e-4


def test_replays_of_a_step_that_starts_kernels_early_are_all_the_same() -> None:
    """Kernels of the step overlap: each must see all that the ones before it wrote, every time."""
    module = example()
    shape = module.Shape(layers=6, wide=1024, heads=8, groups=2, depth=128, hidden=2816, words=4096)
    weights = {name: a.astype(ml_dtypes.bfloat16) for name, a in module.make_weights(shape, np.random.default_rng(4)).items()}
    g = module.build(shape, weights, tw.bf16, 256)
    given = {"token": np.array([5], np.int32), "position": np.zeros(1, np.int32)}
    step = g.capture("cuda", **given)
    assert step.nodes <= 6 * 7 + 4
    wanted = module.reference(shape, {name: a.astype(np.float64) for name, a in weights.items()}, [5])[0]
    first = np.asarray(step(**given)["logits"], np.float32).reshape(-1)
    assert np.abs(first - wanted).max() < 0.15 * wanted.std()
    for _ in range(50):
        assert np.array_equal(np.asarray(step(**given)["logits"], np.float32).reshape(-1), first)
    eager = g.run(device="cuda", **given)
    assert np.array_equal(np.asarray(eager["logits"], np.float32).reshape(-1), first)


def test_a_capture_grows(recwarn: pytest.WarningsRecorder) -> None:
    module = example()
    shape = module.Shape(layers=1)
    weights = module.make_weights(shape, np.random.default_rng(2))
    tokens = list(range(9))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tw.PerformanceWarning)
        found = module.decode(module.build(shape, weights), tokens, "cuda", 4)
    wanted = module.reference(shape, weights, tokens)
    assert max(np.abs(a - b).max() for a, b in zip(found, wanted, strict=True)) < 2e-4


def test_profile_on_a_gpu() -> None:
    g = tw.TensorGraph("profiled")
    x = g.input("x", ("n", 64), tw.f32)
    g.output("y", g.op("Silu", g.op("MulMat", x, weight=np.ones((64, 64), np.float32), name="product"), name="silu"))
    profile = g.profile("cuda", x=np.ones((8, 64), np.float32), runs=2)
    assert [row.nodes for row in profile.rows] == [("product",), ("silu",)]
    assert all(row.seconds > 0 for row in profile.rows)
