"""Pictures for the pipeline: PNG files, a scene that is made up, the mosaic that a sensor would see of it, and contact sheets."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
SIGNATURE = b"\x89PNG\r\n\x1a\n"


def write_png(path: str | Path, picture: Bytes) -> Path:
    """Write `picture[row, column]` (grey) or `picture[row, column, channel]` (red, green, blue)."""
    height, width = picture.shape[:2]
    colour = 2 if picture.ndim == 3 else 0
    rows = np.ascontiguousarray(picture).reshape(height, -1)
    lines = np.concatenate([np.zeros((height, 1), np.uint8), rows], axis=1)
    parts = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)), (b"IDAT", zlib.compress(lines.tobytes(), 6)), (b"IEND", b"")]
    data = SIGNATURE + b"".join(struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in parts)
    Path(path).write_bytes(data)
    return Path(path)


def read_png(path: str | Path) -> Bytes:
    """A PNG of 8 bits without interlacing, grey or coloured. Raises `ValueError` for others."""
    data = Path(path).read_bytes()
    if data[:8] != SIGNATURE:
        raise ValueError(f"{path} is no PNG file")
    at, packed, head = 8, b"", b""
    while at + 8 <= len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        name, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        head = body if name == b"IHDR" else head
        packed += body if name == b"IDAT" else b""
        at += 12 + size
    width, height, bits, colour, _, _, interlaced = struct.unpack(">IIBBBBB", head)
    channels = {0: 1, 2: 3, 6: 4}.get(colour, 0)
    if bits != 8 or interlaced or not channels:
        raise ValueError(f"{path}: PNG files of 8 bits without palette or interlacing can be read")
    lines = np.frombuffer(zlib.decompress(packed), np.uint8).reshape(height, 1 + width * channels)
    found = np.zeros((height, width * channels), np.uint8)
    for row in range(height):
        found[row] = _unfiltered(int(lines[row, 0]), lines[row, 1:], found[row - 1] if row else np.zeros(width * channels, np.uint8), channels)
    return found.reshape(height, width) if channels == 1 else found.reshape(height, width, channels)[:, :, :3]


def _unfiltered(kind: int, line: Bytes, above: Bytes, step: int) -> Bytes:
    """Undo what PNG did to a row so that it packs better."""
    if kind == 0:
        return line
    if kind == 2:
        return line + above
    made = [0] * step + line.tolist()
    up = [0] * step + above.tolist()
    for k in range(step, len(made)):
        left, corner = made[k - step], up[k - step]
        guess = left + up[k] - corner
        paeth = min((abs(guess - left), 0, left), (abs(guess - up[k]), 1, up[k]), (abs(guess - corner), 2, corner))[2]
        made[k] = (made[k] + {1: left, 3: (left + up[k]) // 2, 4: paeth}[kind]) & 255
    return np.array(made[step:], np.uint8)


def scene(height: int, width: int) -> Bytes:
    """A made-up picture: a sky, hills, a sun behind haze, a house with windows; dark, and with little contrast."""
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    y, x = y / height, x / width
    picture = np.stack([0.20 + 0.25 * y, 0.26 + 0.20 * y, 0.42 - 0.05 * y], axis=-1)
    haze = np.exp(-(((x - 0.72) ** 2 + (y - 0.28) ** 2) / 0.02))[..., None]
    picture += haze * np.array([0.40, 0.30, 0.10], np.float32)
    for number, (base, swing, colour) in enumerate([(0.55, 0.06, (0.16, 0.24, 0.22)), (0.68, 0.05, (0.12, 0.22, 0.12)), (0.82, 0.04, (0.16, 0.14, 0.07))]):
        hill = y > base + swing * np.sin((3 + 2 * number) * x * np.pi + number) + 0.01 * np.sin(60 * x + number)
        grain = 0.04 * np.sin(900 * x * (number + 1)) * np.sin(700 * y)
        picture[hill] = (np.array(colour, np.float32) + grain[..., None])[hill]
    house = (abs(x - 0.3) < 0.09) & (y > 0.55) & (y < 0.8)
    picture[house] = (0.34, 0.22, 0.17)
    roof = (y > 0.44) & (y < 0.55) & (abs(x - 0.3) < (y - 0.44) * 1.1)
    picture[roof] = (0.30, 0.10, 0.08)
    windows = house & (np.abs((x - 0.21) % 0.06 - 0.03) < 0.014) & (np.abs((y - 0.57) % 0.11 - 0.05) < 0.03)
    picture[windows] = (0.62, 0.55, 0.25)
    noise = np.random.default_rng(0).normal(0, 0.012, (height, width, 3))
    return np.asarray(np.clip(picture + noise, 0, 1) * 255, np.uint8)


def mosaic(picture: Bytes) -> Bytes:
    """What a sensor sees through filters of red, green, green, blue."""
    raw = picture[:, :, 1].copy()
    raw[0::2, 0::2] = picture[0::2, 0::2, 0]
    raw[1::2, 1::2] = picture[1::2, 1::2, 2]
    return raw


def contact_sheet(pictures: list[Bytes]) -> Bytes:
    """Pictures of one height side by side, with a white rim."""
    shown = [np.repeat(p[:, :, None], 3, 2) if p.ndim == 2 else p for p in pictures]
    rim = np.full((shown[0].shape[0], 8, 3), 255, np.uint8)
    return np.concatenate([part for p in shown for part in (p, rim)][:-1], axis=1)
