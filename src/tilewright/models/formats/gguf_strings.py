"""Arrays of strings in GGUF files, found and decoded without a loop over them where that goes.

In: bytes in which each string is its length (u64) and its text. Out: where each begins, then a list of `str`. The places form a chain, each
given by the length before it. Strings of less than 256 bytes have seven zero bytes in their length, so NumPy finds all places that may
begin one, and a comparison proves the chain. Where that fails (long strings, zeros inside) the chain is followed one by one.
"""

from __future__ import annotations

import numpy as np

_WORD = 8
_LOOK = 1 << 16
"""Candidates that are looked for at once, in bytes; grows as long as the chain holds."""


def follow(data: np.ndarray, at: int, count: int) -> tuple[np.ndarray, int]:
    """Where up to `count` strings begin, from `at` on, and where the last one ends. Fewer where the bytes end before all are there."""
    found: list[np.ndarray] = []
    left, look = count, _LOOK
    while left:
        starts, at, is_whole = _leap(data, at, left, look)
        look = min(look * 4, 1 << 22) if is_whole else _LOOK
        found.append(starts)
        left -= len(starts)
        if not left or is_whole:
            if left and not len(starts):
                break
            continue
        # One by one past what the leap did not believe.
        single = []
        for _ in range(min(left, 64)):
            if at + _WORD > len(data):
                break
            length = int.from_bytes(data[at : at + _WORD].tobytes(), "little")
            if at + _WORD + length > len(data):
                break
            single.append(at)
            at += _WORD + length
        found.append(np.array(single, np.int64))
        left -= len(single)
        if not single:
            break
    return (np.concatenate(found) if found else np.empty(0, np.int64)), at


def _leap(data: np.ndarray, at: int, count: int, look: int) -> tuple[np.ndarray, int, bool]:
    """The longest run of strings that a glance at the next bytes proves; where it ends; whether it went to the end of what was looked at."""
    part = data[at : at + look]
    places = max(len(part) - _WORD + 1, 0)
    zero = part[1:] == 0
    pairs = zero[:-1] & zero[1:]
    fours = pairs[:-2] & pairs[2:]
    sevens = fours[: places] & fours[3 : 3 + places]
    starts = np.flatnonzero(sevens[:places])
    if not len(starts) or starts[0]:
        return np.empty(0, np.int64), at, False
    ends = starts + _WORD + part[starts]
    good = np.flatnonzero(ends[:-1] != starts[1:])
    run = min(int(good[0]) + 1 if len(good) else len(starts), count)
    if ends[run - 1] > len(part):
        run -= 1
    if not run:
        return np.empty(0, np.int64), at, False
    is_whole = run < count and run >= len(starts) - 1 and len(part) == look
    return starts[:run].astype(np.int64) + at, at + int(ends[run - 1]), is_whole


def decode(data: np.ndarray, starts: np.ndarray, end: int) -> list[str]:
    """The strings that begin at these places, of which the last ends at `end`. Raises `UnicodeDecodeError`."""
    if not len(starts):
        return []
    first = int(starts[0])
    places = starts - first
    part = data[first:end].copy()
    longest = int(np.diff(places, append=len(part)).max()) - _WORD
    for k in range(1 if longest < 256 else _WORD):
        part[places + k] = 0
    text = part != 0
    if len(part) - np.count_nonzero(text) == _WORD * len(starts):
        # There are no zeros but the lengths. One is left before each string.
        text[places] = True
        joined: str = part[text].tobytes().decode("utf-8")
        return joined.split("\0")[1:]
    raw, stops = data[first:end].tobytes(), [*places[1:].tolist(), len(part)]
    return [raw[begin + _WORD : stop].decode("utf-8") for begin, stop in zip(places.tolist(), stops)]
