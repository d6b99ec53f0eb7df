"""`@parallel(data)` of ZynML: a block's batch on the devices it names."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw
from tilewright.base.errors import UserError
from tilewright.runtime import cpu_pool

pytestmark = pytest.mark.skipif(len(cpu_pool.usable_cores()) < 2, reason="one core has no parts")

PROGRAM = """
let y = compute(x, v) @device(["cpu:0/2", "cpu:1/2"]) @parallel(data) {
    @kernel elementwise
    for i in 0..rows, j in 0..cols:
        out[i, j] = x[i, j] * v[j]
}
"""


def test_a_block_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    plain = cpu_pool.Pool.launch

    def launch(pool: cpu_pool.Pool, *arguments: int) -> None:
        seen.append(f"{pool.cores}")
        plain(pool, *arguments)

    monkeypatch.setattr(cpu_pool.Pool, "launch", launch)
    x, v = np.random.default_rng(1).standard_normal((100, 8)).astype(np.float32), np.arange(8, dtype=np.float32)
    module = tw.load(PROGRAM)
    for _ in range(2):
        np.testing.assert_array_equal(module.run(x=x, v=v)["y"], x * v)
    halves = [f"{cpu_pool.partition_cores(n, 2)}" for n in range(2)]
    assert sorted(seen) == sorted(halves * 2)


def test_with_a_future() -> None:
    x, v = np.ones((100, 8), np.float32), np.arange(8, dtype=np.float32)
    text = PROGRAM.replace("@parallel(data)", "@parallel(data) @async") + "let z = await y\n"
    np.testing.assert_array_equal(tw.load(text).run(x=x, v=v)["z"], x * v)


@pytest.mark.parametrize(
    ("attributes", "what"),
    [
        ('@parallel(data) @device("cpu:0/2")', None),
        ("@parallel(data)", "@parallel without (data) and a list of devices"),
        ('@parallel(model) @device(["cpu:0/2", "cpu:1/2"])', "@parallel without (data) and a list of devices"),
    ],
)
def test_what_is_missing_is_said(attributes: str, what: str | None) -> None:
    text = PROGRAM.replace('@device(["cpu:0/2", "cpu:1/2"]) @parallel(data)', attributes)
    given = {"x": np.ones((4, 8), np.float32), "v": np.ones(8, np.float32)}
    if what is None:
        assert tw.load(text).run(**given)["y"].shape == (4, 8)  # type: ignore[attr-defined]
        return
    with pytest.raises(UserError) as caught:
        tw.load(text).run(**given)
    assert what in str(caught.value)


def test_rows_that_need_each_other_are_refused_with_their_line() -> None:
    text = PROGRAM.replace("x[i, j] * v[j]", "x[i, j] * (i + j)")
    with pytest.raises(UserError, match="the index 'i' is used as a number") as caught:
        tw.load(text.replace("(x, v)", "(x)")).run(x=np.ones((4, 8), np.float32))
    assert caught.value.diagnostics[0].span.line == 5
