"""The image pipeline of `examples/images` on a picture of 12 megapixels, beside OpenCV and Numba where they are installed.

    python -m bench.images                  prints the table
    python -m bench.images --out FOLDER     also writes lines of JSON

All compute the same pipeline in f32 and give u8. OpenCV's has its own functions where it has them and NumPy for the rest; Numba's is one loop for each step, in parallel over rows. Variants
take turns, and the best of some rounds counts.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

AMOUNT = 0.8


def opencv() -> Callable[[np.ndarray], Any]:
    import cv2

    cv2.setNumThreads(os.cpu_count() or 1)
    taps = np.array([1, 4, 6, 4, 1], np.float32) / 16
    edge = cv2.BORDER_REPLICATE

    def run(raw: np.ndarray) -> Any:
        colours = cv2.demosaicing(raw, cv2.COLOR_BayerRGGB2RGB).astype(np.float32) * np.float32(1 / 255)
        soft = cv2.sepFilter2D(colours, -1, taps, taps, borderType=edge)
        v = np.clip(cv2.addWeighted(colours, 1 + AMOUNT, soft, -AMOUNT, 0), 0, 1)
        toned = np.clip(v * (2.51 * v + 0.03) / (v * (2.43 * v + 0.59) + 0.14), 0, 1)
        y = cv2.cvtColor(toned, cv2.COLOR_RGB2GRAY)
        gx, gy = cv2.Sobel(y, cv2.CV_32F, 1, 0, borderType=edge), cv2.Sobel(y, cv2.CV_32F, 0, 1, borderType=edge)
        edges = np.minimum(cv2.magnitude(gx, gy) * 255, 255).astype(np.uint8)
        level = (y * 255).astype(np.uint8)
        ranks = (np.cumsum(np.ravel(cv2.calcHist([level], [0], None, [256], [0, 256]))) / y.size).astype(np.float32)
        gain = cv2.LUT(level, ranks) / np.maximum(y, 0.004) * 255
        return np.clip(toned * gain[..., None], 0, 255).astype(np.uint8), edges

    return run


def numba_loops() -> Callable[[np.ndarray], Any]:
    import numba

    f = np.float32

    @numba.njit(parallel=True, fastmath=False)
    def run(raw):  # type: ignore[no-untyped-def]
        h, w = raw.shape
        colours, rows, toned = np.empty((3, h, w), f), np.empty((3, h, w), f), np.empty((3, h, w), f)
        y, edges, picture = np.empty((h, w), f), np.empty((h, w), np.uint8), np.empty((3, h, w), np.uint8)
        for i in numba.prange(h):
            up, down = max(i - 1, 0), min(i + 1, h - 1)
            for j in range(w):
                left, right = max(j - 1, 0), min(j + 1, w - 1)
                here = f(raw[i, j]) * f(1 / 255)
                across = (f(raw[i, left]) + f(raw[i, right])) * f(0.5 / 255)
                along = (f(raw[up, j]) + f(raw[down, j])) * f(0.5 / 255)
                corners = (f(raw[up, left]) + f(raw[up, right]) + f(raw[down, left]) + f(raw[down, right])) * f(0.25 / 255)
                around = (across + along) * f(0.5)
                if i % 2 == 0:
                    colours[0, i, j] = here if j % 2 == 0 else across
                    colours[1, i, j] = around if j % 2 == 0 else here
                    colours[2, i, j] = corners if j % 2 == 0 else along
                else:
                    colours[0, i, j] = along if j % 2 == 0 else corners
                    colours[1, i, j] = here if j % 2 == 0 else around
                    colours[2, i, j] = across if j % 2 == 0 else here
        for i in numba.prange(h):
            a, b, c, d = max(i - 2, 0), max(i - 1, 0), min(i + 1, h - 1), min(i + 2, h - 1)
            for k in range(3):
                for j in range(w):
                    rows[k, i, j] = (colours[k, a, j] + colours[k, d, j] + f(4) * (colours[k, b, j] + colours[k, c, j]) + f(6) * colours[k, i, j]) * f(1 / 16)
        for i in numba.prange(h):
            for k in range(3):
                for j in range(w):
                    a, b, c, d = max(j - 2, 0), max(j - 1, 0), min(j + 1, w - 1), min(j + 2, w - 1)
                    soft = (rows[k, i, a] + rows[k, i, d] + f(4) * (rows[k, i, b] + rows[k, i, c]) + f(6) * rows[k, i, j]) * f(1 / 16)
                    x = colours[k, i, j]
                    v = min(max(x + f(AMOUNT) * (x - soft), f(0)), f(1))
                    toned[k, i, j] = min(max(v * (f(2.51) * v + f(0.03)) / (v * (f(2.43) * v + f(0.59)) + f(0.14)), f(0)), f(1))
            for j in range(w):
                y[i, j] = f(0.299) * toned[0, i, j] + f(0.587) * toned[1, i, j] + f(0.114) * toned[2, i, j]
        counts = np.zeros((h, 256), np.int32)
        for i in numba.prange(h):
            up, down = max(i - 1, 0), min(i + 1, h - 1)
            for j in range(w):
                left, right = max(j - 1, 0), min(j + 1, w - 1)
                gx = (y[up, right] + f(2) * y[i, right] + y[down, right]) - (y[up, left] + f(2) * y[i, left] + y[down, left])
                gy = (y[down, left] + f(2) * y[down, j] + y[down, right]) - (y[up, left] + f(2) * y[up, j] + y[up, right])
                edges[i, j] = np.uint8(min(np.sqrt(gx * gx + gy * gy) * f(255), f(255)))
                counts[i, int(y[i, j] * f(255))] += 1
        ranks = (np.cumsum(counts.sum(axis=0)) / (h * w)).astype(np.float32)
        for i in numba.prange(h):
            for j in range(w):
                gain = ranks[int(y[i, j] * f(255))] / max(y[i, j], f(0.004)) * f(255)
                for k in range(3):
                    picture[k, i, j] = np.uint8(min(max(toned[k, i, j] * gain, f(0)), f(255)))
        return picture, edges

    return run  # type: ignore[no-any-return]


def variants() -> dict[str, Callable[[np.ndarray], Any]]:
    folder = Path(__file__).parents[1] / "examples/images"
    sys.path.insert(0, str(folder))
    try:
        import pipeline
    finally:
        sys.path.remove(str(folder))
    import tilewright as tw

    module = tw.load(str(folder / "pipeline.zyn"))
    found: dict[str, Callable[[np.ndarray], Any]] = {
        "tilewright": lambda raw: pipeline.develop(raw, AMOUNT),
        "tilewright, ZynML": lambda raw: tuple(module.run(raw=raw, amount=AMOUNT).values()),
    }
    for name, made in (("OpenCV", opencv), ("Numba", numba_loops)):
        try:
            found[name] = made()
        except ImportError:
            print(f"{name} is not installed")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", help="folder for lines of JSON")
    parser.add_argument("--shape", type=int, nargs=2, default=(3000, 4000))
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    raw = np.random.default_rng(0).integers(0, 256, options.shape, dtype=np.uint8)
    runs = variants()
    results = {name: run(raw) for name, run in runs.items()}
    times = dict.fromkeys(runs, float("inf"))
    own = dict.fromkeys(runs, float("inf"))
    for _ in range(options.rounds):
        for name, run in runs.items():
            begin, own_begin = time.perf_counter(), time.process_time()
            run(raw)
            times[name] = min(times[name], time.perf_counter() - begin)
            own[name] = min(own[name], time.process_time() - own_begin)
    rows = []
    for name in runs:
        apart = float(np.mean(np.abs(results[name][1].astype(np.float32) - results["tilewright"][1])))
        rows.append({"variant": name, "ms": 1e3 * times[name], "cpu_ms": 1e3 * own[name], "mean_difference_of_edges": apart})
        print(f"{name:<20} {1e3 * times[name]:8.1f} ms   processor time {1e3 * own[name]:8.1f} ms   edges differ by {apart:.3f} of 255")
    if options.out:
        line = {"bench": "images", "shape": list(options.shape), "load": os.getloadavg()[0], "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        (Path(options.out) / "images.jsonl").write_text("".join(json.dumps(line | row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
