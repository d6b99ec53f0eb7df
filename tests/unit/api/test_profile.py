"""Profiles: what is counted, the table, the timeline, and that watching ends."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import tilewright as tw
from null_cuda.install import installed
from tilewright.base.errors import UserError


@tw.kernel
def halves(x: tw.Array) -> tw.Array:
    n, m = x.shape
    out = tw.empty((n, m), x.dtype)
    for i, j in tw.grid(n, m):
        out[i, j] = 0.5 * x[i, j]
    return out


@tw.kernel
def times(a: tw.Array, b: tw.Array) -> tw.Array:
    n, k = a.shape
    m = b.shape[1]
    out = tw.empty((n, m), a.dtype)
    for i, j in tw.grid(n, m):
        total = 0.0
        for p in range(k):
            total += a[i, p] * b[p, j]
        out[i, j] = total
    return out


def test_calls_are_counted() -> None:
    x = np.ones((30, 40), np.float32)
    halves(x)
    halves(x)
    assert type(halves.__call__).__name__ == "builtin_function_or_method"
    with tw.profile() as found:
        for _ in range(3):
            halves(x)
        times(x, np.ones((40, 50), np.float32))
        halves(x.astype(np.float64), device="emulator")
    halves(x)
    rows = {(row.name, row.device): row for row in found.rows()}
    assert rows.keys() == {("halves", "cpu"), ("times", "cpu"), ("halves", "emulator:thread")}
    ours = rows["halves", "cpu"]
    assert (ours.calls, ours.launches, ours.operations, ours.bytes) == (3, 3, 3 * 1200, 3 * 2 * 4 * 1200)
    product = rows["times", "cpu"]
    assert (product.operations, product.bytes) == (2 * 30 * 40 * 50, 4 * (30 * 40 + 40 * 50 + 30 * 50))
    assert 0 < ours.seconds <= found.seconds
    assert all(0 <= call.start <= found.seconds for call in found.calls)
    halves(x)
    assert type(halves.__call__).__name__ == "builtin_function_or_method"
    assert len(found.calls) == 5


def test_table() -> None:
    x = np.ones((64, 64), np.float32)
    with tw.profile() as found:
        halves(x)
    head, line = str(found).splitlines()
    assert head.split() == ["kernel", "device", "calls", "launches", "compile", "time", "part", "each", "GB/s", "GFLOP/s"]
    assert line.split()[:4] == ["halves", "cpu", "1", "1"]
    assert "100.0 %" in line


def test_timeline(tmp_path: Path) -> None:
    x = np.ones((64, 64), np.float32)
    with tw.profile() as found:
        halves(x)
        halves(x)
    found.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["name"] for e in events] == ["halves", "halves"]
    first, second = events
    assert first["ph"] == "X" and first["ts"] + first["dur"] <= second["ts"]
    assert first["args"] == {"device": "cpu", "operations": 4096, "bytes": 2 * 4 * 4096}
    with pytest.raises(UserError, match="cannot be written"):
        found.save(tmp_path / "no" / "trace.json")


def test_failures_end_it() -> None:
    with pytest.raises(UserError, match="a profile is open already"), tw.profile(), tw.profile():
        pass
    with pytest.raises(UserError, match="axis 0 of 'b' is 5"), tw.profile() as found:
        times(np.ones((3, 4), np.float32), np.ones((5, 6), np.float32))
    assert [call.name for call in found.calls] == ["times"]
    with tw.profile() as found:
        pass
    assert (found.calls, found.rows(), found.table().count("\n")) == ([], [], 0)


def test_launches_on_a_gpu() -> None:
    @tw.kernel
    def share(x: tw.Array) -> tw.Array:
        n = x.shape[0]
        total = 0.0
        for i in tw.grid(n):
            total += x[i]
        out = tw.empty((n,), x.dtype)
        for i in tw.grid(n):
            out[i] = x[i] / total
        return out

    with installed() as driver:
        x = tw.array(np.arange(1.0, 5001.0, dtype=np.float32), device="cuda")
        stream = tw.Stream(device="cuda")
        share(x)
        with tw.profile():
            kept = [share(x) for _ in range(3)]
            with stream:
                share(x)
        events = driver.leaks().get("event", 0)
        with tw.profile() as found:
            kept = [share(x) for _ in range(3)]
            with stream:
                share(x)
        assert driver.leaks().get("event", 0) == events  # those of the first profile serve again
        (row,) = found.rows()
        kernels = len(share.last.launches)
        assert (row.device, row.calls, row.launches) == ("cuda:0", 4, 4 * kernels)
        assert kernels >= 2 and [launch.entry for launch in found.launches[:kernels]] == [launch.entry for launch in share.last.launches]
        assert {launch.stream for launch in found.launches} == {0, stream.handle}
        assert row.bytes == 4 * 2 * 4 * 5000
        assert found.memory["cuda:0"] >= 5 * 20000
        lines = str(found).splitlines()
        assert lines[1].split()[:4] == ["share", "cuda:0", "4", str(4 * kernels)] and len(lines) == 2 + kernels + 1
        kinds = [event["cat"] for event in found.trace()["traceEvents"]]
        assert (kinds.count("call"), kinds.count("kernel")) == (4, 4 * kernels)
        assert float(np.asarray(kept[0]).sum()) == pytest.approx(1.0, rel=1e-5)
        del kept, stream
