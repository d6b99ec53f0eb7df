"""Rows of the demo's tables: what running one example on one device gave.

In: results and what they should be. Out: rows, with the largest error, a rate and a time to read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewright.execute.devices import Device, array_device, kind_of


def speed_class(device: Device) -> str:
    """How much a device can be given to do in a moment: `simulated` little, `host` more, `device` most."""
    if kind_of(device).simulated:
        return "simulated"
    return "host" if array_device(device) is None else "device"


@dataclass(frozen=True)
class DemoRow:
    """What running one example on one device gave."""

    name: str
    device: str
    seconds: float = 0.0
    nbytes: int = 0
    operations: float = 0.0
    numpy_seconds: float = 0.0
    error: float = 0.0
    tolerance: float = 0.0
    failure: str = ""

    @property
    def ok(self) -> bool:
        return not self.failure and self.error <= self.tolerance

    @property
    def rate(self) -> str:
        """Arithmetic in a second for contractions, bytes for the others."""
        amount, unit = (self.operations, "op/s") if self.operations else (self.nbytes, "B/s")
        giga = amount / self.seconds / 1e9
        return f"{giga:.1f} G{unit}" if giga < 1e3 else f"{giga / 1e3:.2f} T{unit}"


def max_error(result: list[object], exact: object) -> float:
    """The largest difference over the largest magnitude (at least 1); infinite where shapes, counts or NaNs differ."""
    expected = as_list(exact)
    if len(result) != len(expected):
        return float("inf")
    worst = 0.0
    for got, want in zip(result, expected):
        a, b = np.asarray(got), np.asarray(want)
        if a.shape != b.shape:
            return float("inf")
        a, b = a.astype(np.float64), b.astype(np.float64)
        if not np.array_equal(np.isnan(a), np.isnan(b)):
            return float("inf")
        if b.size:
            worst = max(worst, float(np.nanmax(np.abs(a - b)) / max(1.0, float(np.nanmax(np.abs(b))))))
    return worst


def as_list(value: object) -> list[object]:
    return list(value) if isinstance(value, tuple) else [value]


def duration(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"
