"""`MatMulNBits` against NumPy in float64: weights stay packed where there is a packed dtype for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from bench.onnx_writer import model, node, single, value

import tilewright as tw
from tilewright.graphs.onnx.block_weights import BlockWeights

RNG = np.random.default_rng(11)
BF16 = ml_dtypes.bfloat16


def packed(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Small numbers along rows, several in a byte."""
    each = 8 // bits
    even = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % each))).reshape(len(numbers), -1, each)
    return np.asarray(np.bitwise_or.reduce(even << np.arange(0, 8, bits, dtype=np.uint8), axis=-1), np.uint8)


@dataclass
class Case:
    """A `MatMulNBits`; `zeros` says what its zero points are, `exact` that f32 scales are those of f16."""

    bits: int
    block: int
    depth: int
    columns: int
    lead: tuple[int, ...]
    dtype: Any = np.float32
    scale: Any = np.float32
    zeros: Any = None
    bias: bool = False
    exact: bool = False

    def __post_init__(self) -> None:
        blocks = -(-self.depth // self.block)
        self.numbers = RNG.integers(0, 1 << self.bits, (self.columns, blocks * self.block)).astype(np.uint8)
        self.scales = (RNG.standard_normal((self.columns, blocks)) / 8).astype(np.float16 if self.exact else self.scale).astype(self.scale)
        offsets = np.full((self.columns, blocks), 1 << self.bits - 1, np.uint8)
        points: Any = None
        if self.zeros == "packed":
            offsets = RNG.integers(0, 1 << self.bits, (self.columns, blocks)).astype(np.uint8)
            points = packed(offsets, self.bits)
        elif self.zeros is not None:
            points = offsets = (RNG.standard_normal((self.columns, blocks)) * 3).astype(self.zeros)
        self.x = RNG.standard_normal((*self.lead, self.depth)).astype(self.dtype)
        bias = RNG.standard_normal(self.columns).astype(self.dtype) if self.bias else None
        self.inputs = [self.x, packed(self.numbers, self.bits).reshape(self.columns, blocks, -1), self.scales, points, None, bias]
        wide, factor = (np.repeat(part.astype(np.float64), self.block, 1) for part in (offsets, self.scales))
        self.weights = ((self.numbers - wide) * factor)[:, : self.depth]
        self.wanted = self.x.astype(np.float64) @ self.weights.T + (0 if bias is None else bias.astype(np.float64))

    def model(self) -> tuple[bytes, dict[str, np.ndarray]]:
        known = [n for n in range(1, 6) if self.inputs[n] is not None]
        form = {"N": self.columns, "K": self.depth, "bits": self.bits, "block_size": self.block}
        return single("MatMulNBits", self.inputs, constants=known, domain="com.microsoft", **form)


# The packed dtype of the weights, or None where they are unpacked.
CASES = [
    (Case(4, 32, 64, 3, (2,)), "q4_g32_f32"),
    (Case(4, 32, 40, 31, (2, 3), bias=True), "q4_g32_f32"),
    (Case(4, 16, 33, 5, (1,), zeros="packed"), "q4_g16_f32_z"),
    (Case(4, 128, 7, 1, ()), "q4_g128_f32"),
    (Case(4, 64, 200, 5, (2,), exact=True), "q4_0"),
    (Case(8, 256, 300, 5, (3,), zeros="packed", bias=True), "q8_g256_f32_z"),
    (Case(8, 64, 100, 7, (5,), exact=True), "q8_0"),
    (Case(4, 32, 96, 5, (9,), np.float16, np.float16, bias=True), "q4_0"),
    (Case(8, 16, 40, 5, (7,), np.float16, np.float16), "q8_g16_f16"),
    (Case(4, 16, 40, 5, (2,), np.float16, np.float16, zeros="packed"), "q4_g16_f16_z"),
    (Case(8, 32, 64, 5, (2, 3), BF16, BF16, zeros="packed"), "q8_g32_f32_z"),
    (Case(4, 32, 40, 5, (2,), np.float64), "q4_g32_f32"),
    (Case(2, 16, 50, 5, (6,)), "q4_g16_f32"),
    (Case(2, 32, 70, 3, (2,), zeros="packed", exact=True), "q4_0"),
    (Case(4, 32, 64, 3, (0,)), "q4_g32_f32"),
    (Case(4, 16, 47, 5, (3,), zeros=np.float32, bias=True), None),
    (Case(4, 512, 600, 3, (2,)), None),
    (Case(8, 32, 33, 3, (2,), np.float64, np.float64), None),
]


@pytest.mark.parametrize(("case", "dtype"), CASES, ids=[f"{c.bits} bits, {c.block}, {list(c.x.shape)}, {dtype}" for c, dtype in CASES])
def test_products(case: Case, dtype: str | None) -> None:
    data, arrays = case.model()
    found = tw.graph.from_onnx(data)
    y = found.run(arrays, device="cpu")
    assert y.shape == case.wanted.shape
    assert y.dtype == case.dtype
    tolerance = {np.float16: 2e-3, BF16: 1e-2}.get(case.dtype, 2e-6) * np.abs(case.wanted).max(initial=0)
    np.testing.assert_allclose(y.astype(np.float64), case.wanted, rtol=0, atol=tolerance)
    kept = [n.data.dtype.name for n in found.graph(arrays).nodes.values() if isinstance(n.data, tw.PackedArray)]
    assert kept == ([] if dtype is None else [dtype])


@pytest.mark.parametrize("case", [Case(4, 32, 40, 3, (2,), zeros="packed"), Case(4, 64, 128, 5, (1,), exact=True), Case(8, 16, 33, 5, (5,), bias=True)])
def test_products_at_the_emulator(case: Case) -> None:
    data, arrays = case.model()
    y = tw.graph.from_onnx(data).run(arrays, device="emulator")
    np.testing.assert_allclose(y.astype(np.float64), case.wanted, rtol=0, atol=2e-6 * np.abs(case.wanted).max())


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_packed_weights_are_the_same_numbers(bits: int) -> None:
    for block in (16, 32, 64, 128, 256):
        for scale in (np.float16, np.float32, BF16):
            for zeros in (None, "packed"):
                for exact in (False, True):
                    case = Case(bits, block, 3 * block, 5, (1,), scale=scale, zeros=zeros, exact=exact)
                    weights = BlockWeights(5, 3, bits, block, case.inputs[1], case.scales, case.inputs[3])
                    made = weights.packed()
                    assert made.dtype is weights.dtype
                    np.testing.assert_array_equal(tw.dequantize(made), weights.floats())
                    np.testing.assert_array_equal(weights.floats(), case.weights.astype(np.float32))


def test_infinite_scales() -> None:
    case = Case(4, 32, 64, 3, (1,))
    case.inputs[2] = np.array([[np.inf, 1], [1e6, 1], [np.nan, 1]], np.float32)
    case.inputs[1] = np.full_like(case.inputs[1], 0x99)
    case.inputs[0] = np.ones((1, 64), np.float32)
    data, arrays = case.model()
    np.testing.assert_array_equal(tw.graph.from_onnx(data).run(arrays, device="cpu"), np.array([[np.inf, 32e6 + 32, np.nan]], np.float32))


def test_weights_are_packed_once_for_all_sizes() -> None:
    case = Case(4, 32, 64, 3, (1,))
    nodes = [node("MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft", N=3, K=64, bits=4, block_size=32)]
    found = tw.graph.from_onnx(model(nodes, [value("x", np.float32, ["n", 64])], ["y"], {"w": case.inputs[1], "s": case.scales}))
    first, second = ([n.data for n in found.graph(x=np.zeros((n, 64), np.float32)).nodes.values() if n.kind == "weight"] for n in (1, 2))
    assert first[0] is second[0]
    assert first[0].nbytes == 3 * 2 * (4 + 16)


@pytest.mark.parametrize(
    ("place", "array", "message"),
    [
        (1, np.zeros((3, 2, 15), np.uint8), r"its weights are uint8\[3, 2, 15\]"),
        (2, np.zeros((3, 3), np.float32), r"its scales are float32\[3, 3\]"),
        (2, np.zeros((3, 2), np.int32), r"its scales are int32\[3, 2\]"),
        (3, np.zeros((3, 2), np.uint8), r"its zero points are uint8\[3, 2\]"),
        (3, np.zeros((3, 1), np.int8), r"its zero points are int8\[3, 1\]"),
        (4, np.zeros(64, np.int32), "an order of groups"),
        (5, np.zeros(2, np.float32), r"its bias is float32\[2\]"),
    ],
)  # fmt: skip
def test_what_does_not_fit(place: int, array: np.ndarray, message: str) -> None:
    case = Case(4, 32, 64, 3, (2,))
    case.inputs[place] = array
    data, arrays = case.model()
    with pytest.raises(tw.UserError, match=message):
        tw.graph.from_onnx(data).run(arrays, device="cpu")
