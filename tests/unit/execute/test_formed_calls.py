"""The short way of calls on devices whose launches are Python: what takes it, and what goes on to the general path."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw
from tilewright.base.errors import UserError
from tilewright.execute.calls.array_calls import ArrayCalls


@tw.kernel
def scaled(x: tw.Array, y: tw.Array, a: float) -> tw.Array:
    n = x.shape[0]
    out = tw.empty((n,), x.dtype)
    for i in tw.grid(n):
        out[i] = x[i] * a + y[i]
    return out


@pytest.fixture(params=[pytest.param("webgpu", marks=pytest.mark.requires("webgpu")), pytest.param("opencl", marks=pytest.mark.requires("opencl"))])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_calls_of_a_form_that_was_seen_are_short(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    general: list[int] = []
    whole = ArrayCalls.run
    monkeypatch.setattr(ArrayCalls, "run", lambda *given: (general.append(1), whole(*given))[1])
    rng = np.random.default_rng(0)
    hosts = [rng.standard_normal(33).astype(np.float32) for _ in range(2)]
    x, y = (tw.to_device(one, device) for one in hosts)

    def close(found: object, a: float, parts: list[np.ndarray] = hosts) -> bool:
        return bool(np.allclose(np.asarray(found.numpy()), parts[0] * np.float32(a) + parts[1], atol=1e-6))  # type: ignore[attr-defined]

    assert close(scaled(x, y, 2.0), 2.0)
    before = len(general)
    assert before
    for a in (3.0, -1.5):
        assert close(scaled(x, y, a), a)
    out = x.copy()
    assert scaled(x, y, 4.0, out=out) is out and close(out, 4.0)
    assert len(general) == before, "same form, other numbers, out= given"
    assert scaled.last is not None and scaled.last.name == "scaled"
    # An integer for a float, other extents, memory that is shared, arrays of the host: the general path.
    assert close(scaled(x, y, 3), 3.0)
    shorter = [one[:17].copy() for one in hosts]
    assert close(scaled(*(tw.to_device(one, device) for one in shorter), 0.5), 0.5, shorter)
    assert close(scaled(x, y, 2.0, out=y), 2.0)
    assert np.allclose(scaled(*hosts, 2.0, device=device), hosts[0] * 2 + hosts[1], atol=1e-6)
    assert len(general) == before + 4
    with pytest.raises(UserError, match="out="):
        scaled(x, x, 2.0, out=tw.to_device(shorter[0], device))
    with pytest.raises(UserError, match="has no argument"):
        scaled(x, y, 2.0, b=1)
