"""The image sample: every step against NumPy in float64, the whole as one kernel and as a ZynML program, and PNG files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewright as tw

FOLDER = Path(__file__).parents[2] / "examples/images"
sys.path.insert(0, str(FOLDER))
import develop as sample  # noqa: E402
import pictures  # noqa: E402
import pipeline  # noqa: E402

sys.path.remove(str(FOLDER))
SHAPES = [(1, 1), (1, 7), (2, 3), (31, 46), (64, 33)]


def shifted(x: np.ndarray, di: int, dj: int) -> np.ndarray:
    h, w = x.shape[-2:]
    return x[..., np.clip(np.arange(h) + di, 0, h - 1)[:, None], np.clip(np.arange(w) + dj, 0, w - 1)]


def reference(raw: np.ndarray, amount: float) -> tuple[np.ndarray, np.ndarray]:
    """The pipeline in float64, before rounding to u8; brightness levels are those of f32, for they are cut off."""
    x = raw / 255.0
    across, along = (shifted(x, 0, -1) + shifted(x, 0, 1)) / 2, (shifted(x, -1, 0) + shifted(x, 1, 0)) / 2
    corners = sum(shifted(x, i, j) for i in (-1, 1) for j in (-1, 1)) / 4
    row, column = np.indices(raw.shape) % 2 == 0
    r = np.where(row, np.where(column, x, across), np.where(column, along, corners))
    g = np.where(row == column, (across + along) / 2, x)
    b = np.where(row, np.where(column, corners, along), np.where(column, across, x))
    colours = np.stack([r, g, b])
    taps = [1, 4, 6, 4, 1]
    soft = sum(t * shifted(colours, k - 2, 0) for k, t in enumerate(taps)) / 16
    soft = sum(t * shifted(soft, 0, k - 2) for k, t in enumerate(taps)) / 16
    v = np.clip(colours + amount * (colours - soft), 0, 1)
    toned = np.clip(v * (2.51 * v + 0.03) / (v * (2.43 * v + 0.59) + 0.14), 0, 1)
    y = 0.299 * toned[0] + 0.587 * toned[1] + 0.114 * toned[2]
    gx = sum(t * (shifted(y, k, 1) - shifted(y, k, -1)) for k, t in ((-1, 1), (0, 2), (1, 1)))
    gy = sum(t * (shifted(y, 1, k) - shifted(y, -1, k)) for k, t in ((-1, 1), (0, 2), (1, 1)))
    level = np.clip(y.astype(np.float32) * 255, 0, 255).astype(int)
    ranks = np.cumsum(np.bincount(level.ravel(), minlength=256)) / y.size
    return np.clip(toned * ranks[level] / np.maximum(y, 0.004) * 255, 0, 255), np.minimum(np.hypot(gx, gy) * 255, 255)


def check(found: tuple[Any, Any], raw: np.ndarray, amount: float) -> None:
    picture, edges = reference(raw, amount)
    assert np.abs(np.moveaxis(found[0], 2, 0) - picture).max() < 1.01 + 255 / raw.size  # a pixel may have the next level
    assert np.abs(found[1] - edges).max() < 1.01


@pytest.mark.parametrize("shape", SHAPES)
def test_the_pipeline_is_what_numpy_gives(shape: tuple[int, int]) -> None:
    raw = np.random.default_rng(shape[1]).integers(0, 256, shape, dtype=np.uint8)
    for amount in (0.0, 0.8):
        found = sample.developed(raw, amount)
        check(found, raw, amount)
    steps = pipeline.demosaic(raw)
    toned = pipeline.tone(pipeline.sharpen(steps, pipeline.blur(steps), 0.8))
    y = pipeline.luminance(toned)
    np.testing.assert_array_equal(np.moveaxis(pipeline.equalise(toned, y, pipeline.histogram(y)), 0, 2), found[0])
    np.testing.assert_array_equal(pipeline.edges(y), found[1])


def test_zynml_gives_the_same() -> None:
    raw = pictures.mosaic(pictures.scene(40, 63))
    for one, other in zip(sample.developed(raw), sample.developed_by_zynml(raw), strict=True):
        np.testing.assert_array_equal(one, other)


def test_pictures_are_read_as_they_were_written(tmp_path: Path) -> None:
    for picture in (pictures.scene(13, 21), pictures.scene(13, 21)[:, :, 0]):
        np.testing.assert_array_equal(pictures.read_png(pictures.write_png(tmp_path / "x.png", picture)), picture)
    (tmp_path / "y.png").write_bytes(b"something else")
    with pytest.raises(ValueError, match="is no PNG file"):
        pictures.read_png(tmp_path / "y.png")


def test_rows_of_png_files_are_unfiltered() -> None:
    random = np.random.default_rng(0)
    above, line = random.integers(0, 256, (2, 12), dtype=np.uint8)
    for step in (1, 3):
        left = np.concatenate([np.zeros(step, np.uint8), line[:-step]]).astype(int)
        corner = np.concatenate([np.zeros(step, np.uint8), above[:-step]]).astype(int)
        guess = left + above - corner
        paeth = [min((abs(g - a), 0, a), (abs(g - b), 1, b), (abs(g - c), 2, c))[2] for g, a, b, c in zip(guess, left, above.astype(int), corner, strict=True)]
        for kind, taken in enumerate((0, left, above.astype(int), (left + above) // 2, np.array(paeth))):
            filtered = ((line.astype(int) - taken) & 255).astype(np.uint8)
            np.testing.assert_array_equal(pictures._unfiltered(kind, filtered, above, step), line)


def test_results_of_a_zynml_function_come_in_the_order_it_returns_them() -> None:
    module = tw.load("""
pipeline both(x):
    let a = compute(x) {
        for i in 0..n, j in 0..m: out[i, j] = x[i, j] + 1.0
    }
    let e = compute(a) {
        for i in 0..n: out[i] = a[i, 0]
    }
    let b = compute(a) {
        for i in 0..n, j in 0..m: out[i, j] = a[i, j] * 2.0
    }
    return (b, e, a)

let (p, q, r) = both(x)
""")
    found = module.run(x=np.arange(6, dtype=np.float32).reshape(2, 3))
    assert found["p"].tolist() == [[2, 4, 6], [8, 10, 12]]
    assert found["q"].tolist() == [1, 4]
    assert found["r"].tolist() == [[1, 2, 3], [4, 5, 6]]
