"""Develop a picture: from the mosaic of a sensor to a picture and its edges, with a contact sheet of before and after.

    python examples/images/develop.py                 a made-up scene
    python examples/images/develop.py photo.png       a picture of yours, seen through a mosaic first
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
from pictures import Bytes, contact_sheet, mosaic, read_png, scene, write_png
from pipeline import develop

import tilewright as tw


def developed(raw: Bytes, amount: float = 0.8) -> tuple[Bytes, Bytes]:
    """The picture as rows of pixels, and its edges."""
    picture, edges = develop(raw, amount)
    return np.moveaxis(np.asarray(picture), 0, 2), np.asarray(edges)


def developed_by_zynml(raw: Bytes, amount: float = 0.8) -> tuple[Bytes, Bytes]:
    """The same by the ZynML program beside this file."""
    found = tw.load(str(Path(__file__).with_name("pipeline.zyn"))).run(raw=raw, amount=amount)
    return np.moveaxis(np.asarray(found["picture"], np.uint8), 0, 2), np.asarray(found["edges"], np.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description="Develop a picture.")
    parser.add_argument("picture", nargs="?", help="a PNG file")
    parser.add_argument("--out", default="contact-sheet.png")
    options = parser.parse_args()
    before = read_png(options.picture) if options.picture else scene(480, 640)
    raw = mosaic(before)
    developed(raw)
    begin = time.perf_counter()
    picture, edges = developed(raw)
    print(f"{raw.shape[1]} x {raw.shape[0]}: {1e3 * (time.perf_counter() - begin):.2f} ms")
    print(write_png(options.out, contact_sheet([raw, picture, edges])))


if __name__ == "__main__":
    main()
