"""Every kernel of the table and of the gallery on a real GPU, against NumPy in f64.

`pytest tests/gpu --record` writes the hashes of the gallery's PTX that ran and was right to `proven.json`;
`tests/structure/test_proven.py` lists what has changed since.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import numpy as np
import pytest

import tilewright as tw
from gallery_cases import CONTRACTION_CASES, GALLERY_CASES, GalleryCase, code_hash, proven_sizes
from kernel_table import CASES, Case
from tilewright.runtime.cuda import device as cuda

pytestmark = pytest.mark.requires("cuda")


@tw.kernel
def total(x: tw.Array) -> int:
    return tw.sum(x)


@tw.kernel
def shifted(x: tw.Array, by: int) -> tw.Array:
    (n,) = x.shape
    out = tw.empty(n, tw.i8)
    for i in tw.grid(n):
        out[i] = x[i] + tw.cast(by, tw.i8)
    return out


PROVEN = Path(__file__).parent / "proven.json"
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_on_the_gpu(case: Case) -> None:
    for shape in (*case.shapes, *case.long_shapes):
        case.check("cuda", shape)


@pytest.mark.parametrize("case", GALLERY_CASES, ids=lambda case: case.name)
def test_gallery_on_the_gpu(case: GalleryCase, request: pytest.FixtureRequest) -> None:
    hashes: set[str] = set()
    for size in proven_sizes():
        arguments = case.arguments(size)
        case.check("cuda", arguments)
        artifact = case.kernel.last
        assert artifact is not None
        hashes.add(code_hash(artifact.code.decode()))
    if request.config.getoption("--record", default=False):
        _record(case.name, cuda.devices()[0].target.name, hashes)


@pytest.mark.parametrize("case", CONTRACTION_CASES, ids=lambda case: case.name)
def test_contractions_of_the_gallery_on_the_gpu(case: GalleryCase) -> None:
    for size in proven_sizes():
        case.check("cuda", case.arguments(size))


def _record(name: str, target: str, hashes: set[str]) -> None:
    known = json.loads(PROVEN.read_text()) if PROVEN.exists() else {}
    entry = known.setdefault(target, {})
    entry[name] = {"sha256": sorted(hashes), "device": cuda.devices()[0].name, "date": datetime.date.today().isoformat()}
    PROVEN.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def test_same_bits_on_every_run() -> None:
    x = np.random.default_rng(0).standard_normal(1_000_003).astype(np.float32)
    for case in GALLERY_CASES:
        if case.name in ("total", "root_mean_square", "where_largest"):
            seen = {np.asarray(case.kernel(x, device="cuda")).tobytes() for _ in range(5)}
            assert len(seen) == 1, case.name


def test_device_arrays_stay_on_the_device() -> None:
    gpu = cuda.devices()[0]
    x = gpu.from_numpy(np.arange(1000, dtype=np.float32))
    relu = next(c.kernel for c in GALLERY_CASES if c.name == "relu")
    result = relu(x)
    assert type(result).__name__ == "DeviceArray"
    np.testing.assert_array_equal(result.numpy(), np.arange(1000, dtype=np.float32))  # type: ignore[attr-defined]
    out = gpu.empty((1000,), tw.f32)
    assert relu(x, out=out) is out
    np.testing.assert_array_equal(out.numpy(), np.arange(1000, dtype=np.float32))


def test_misaligned_device_arrays() -> None:
    """A view that starts one element in: no 16-byte access may be assumed of it, as input or as output."""
    gpu = cuda.devices()[0]
    whole = gpu.from_numpy(np.arange(4097, dtype=np.float32) - 2000)
    relu = next(c.kernel for c in GALLERY_CASES if c.name == "relu")
    expected = np.maximum(np.arange(1, 4097, dtype=np.float32) - 2000, 0)
    np.testing.assert_array_equal(relu(whole[1:]).numpy(), expected)  # type: ignore[attr-defined]
    target = gpu.from_numpy(np.zeros(4097, np.float32))
    relu(whole[:-1], out=target[1:])
    np.testing.assert_array_equal(target.numpy()[1:], np.maximum(np.arange(4096, dtype=np.float32) - 2000, 0))


def test_more_than_two_to_the_31_elements() -> None:
    gpu = cuda.devices()[0]
    if gpu.memory < 12 << 30:
        pytest.skip("needs 12 GB of device memory")
    count = 2**31 + 12345
    host = np.zeros(count, np.int8)
    host[-1], host[2**31] = 5, 3
    x = gpu.from_numpy(host)
    assert int(np.asarray(total(x).numpy())) == 8  # type: ignore[attr-defined]
    result = shifted(x, 1).numpy()  # type: ignore[attr-defined]
    assert result[-1] == 6
    assert result[2**31] == 4
    assert result[2**31 - 1] == 1
