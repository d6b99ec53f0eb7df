"""`@async` blocks and `await` of ZynML, on the CPU, the emulator and a null GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import tilewright as tw
from null_cuda.install import installed

X = np.arange(6, dtype=np.float32)
BLOCK = "@kernel elementwise\n    for i in 0..n: out[i]"


@pytest.fixture(params=["cpu", "emulator", "cuda"])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param != "cuda":
        yield request.param
        return
    with installed(mode="random"):
        yield "cuda"


def run(text: str, device: str, **inputs: Any) -> dict[str, Any]:
    return tw.load(text.replace("BLOCK", BLOCK)).run(device=device, **inputs)


def test_blocks_give_futures_and_take_them(device: str) -> None:
    found = run(
        """
let a = compute(x) @async {
    BLOCK = x[i] * 2
}
let b = compute(a) @async {
    BLOCK = a[i] + 1
}
let c = compute(b) {
    BLOCK = b[i] * 10
}
let y = await b
let (p, q) = await all([a, b])
let (first, index) = await any([b])
""",
        device, x=X,
    )  # fmt: skip
    assert isinstance(found["a"], tw.Future)
    np.testing.assert_array_equal(np.asarray(found["c"]), (X * 2 + 1) * 10)
    np.testing.assert_array_equal(np.asarray(found["y"]), X * 2 + 1)
    np.testing.assert_array_equal(np.asarray(found["p"]), X * 2)
    np.testing.assert_array_equal(np.asarray(found["q"]), X * 2 + 1)
    np.testing.assert_array_equal(np.asarray(found["first"]), X * 2 + 1)
    assert found["index"] == 0


def test_a_timeout_takes_the_other_value() -> None:
    text = """
let a = compute(x) @async {
    BLOCK = x[i] * 2
}
let y = await a timeout 20ms else -1
let z = await a timeout 60s else -1
"""
    gate: tw.Future[Any] = tw.Future()
    with tw.Stream("cpu") as stream:
        stream.wait(gate)
        threading.Timer(0.3, lambda: gate.set_result(None)).start()
        found = run(text, "cpu", x=X)
    assert found["y"] == -1
    np.testing.assert_array_equal(found["z"], X * 2)


def test_errors_are_raised_where_they_are_awaited() -> None:
    text = """
let a = compute(x, w) @async {
    @kernel elementwise
    for i in 0..n: out[i] = x[i] * w[i]
}
let y = await a
"""
    with pytest.raises(tw.UserError, match="TW004"):
        run(text, "cpu", x=X, w=X[:3])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("let y = await x", "await of a ndarray"),
        ("let y = await all([x, x])", "await all"),
        ("let y = await any(x)", "await any"),
        ("let a = compute(x) @async { BLOCK = x[i] }\nlet y = await a timeout (0 - 1) else 0", "the timeout is -1"),
        ("let a = compute(x) @async { BLOCK = x[i] }\nlet y = a + 1", "arithmetic with a Future"),
    ],
)
def test_mistakes(text: str, message: str) -> None:
    with pytest.raises(tw.UserError, match=message):
        run(text.replace("{ BLOCK", "{\n    BLOCK").replace(" }\n", "\n}\n"), "cpu", x=X)


def test_what_is_awaited_is_an_input_too() -> None:
    module = tw.load("let y = await f timeout limit else other")
    assert module.inputs() == ("f", "limit", "other")
    future: tw.Future[int] = tw.Future()
    future.set_result(7)
    assert module.run(f=future, limit=1, other=2) == {"y": 7}
