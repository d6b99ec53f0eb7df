"""`@parallel` of ZynML: a block's batch, or its steps, on the devices it names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import tilewright as tw
from copy_kernels import register_copies
from null_cuda.install import installed
from tilewright.base.errors import UserError
from tilewright.cli.main import cli
from tilewright.distributed.model_parallel import ModelParallel, cuts
from tilewright.distributed.placement import PlacedJob
from tilewright.execute.devices import find_device
from tilewright.runtime.cpu import pool as cpu_pool

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
    plain = cpu_pool.ThreadPool.launch

    def launch(pool: cpu_pool.ThreadPool, *arguments: int) -> None:
        seen.append(f"{pool.cores}")
        plain(pool, *arguments)

    monkeypatch.setattr(cpu_pool.ThreadPool, "launch", launch)
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
        ("@parallel(data)", "<string>:2:23: error[TW016]: @parallel without a list of devices"),
        ('@parallel(data) @device("auto")', "<string>:2:23: error[TW016]: @parallel without a list of devices"),
        ('@device(["cpu", "cpu"][0]) @parallel(data)', "<string>:2:50: error[TW016]: @parallel without a list of devices"),
        ("@parallel(model)", "<string>:2:23: error[TW016]: @parallel without a list of devices"),
        ('@parallel(batch) @device(["cpu:0/2", "cpu:1/2"])', "<string>:2:23: error[TW016]: @parallel takes data or model"),
        (
            '@parallel(model) @device(["cpu:0/2", "cpu:1/2"])',
            "<string>:2:9: error[TW012]: @parallel(model) over 2 devices, but the block is 1 step after fusion",
        ),
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
    assert str(caught.value).splitlines()[0] == what


MODEL = """
let y = compute(x, w1, w2, w3) @device(["cpu:0/2", "cpu:1/2"]) @parallel(model) {
    @kernel large_model_forward
    let first = relu(x @ w1)
    let second = relu(first @ w2)
    out = second @ w3
}
"""


def layers() -> dict[str, np.ndarray]:
    made = np.random.default_rng(2)
    shapes = {"x": (24, 32), "w1": (32, 48), "w2": (48, 160), "w3": (160, 8)}
    return {name: (made.standard_normal(shape) / shape[0] ** 0.5).astype(np.float32) for name, shape in shapes.items()}


def forward(given: dict[str, np.ndarray]) -> np.ndarray:
    x, w1, w2, w3 = (array.astype(np.float64) for array in given.values())
    return np.maximum(np.maximum(x @ w1, 0) @ w2, 0) @ w3


def test_the_steps_of_a_block_are_on_their_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str]] = []
    plain = ModelParallel.placement_of

    def placement_of(model: ModelParallel, jobs: Sequence[PlacedJob]) -> Mapping[str, str]:
        found = plain(model, jobs)
        seen.extend(found.items())
        return found

    monkeypatch.setattr(ModelParallel, "placement_of", placement_of)
    given = layers()
    module = tw.load(MODEL)
    for _ in range(2):
        np.testing.assert_allclose(module.run(**given)["y"], forward(given), rtol=1e-5, atol=1e-5)
    assert [name for name, _ in seen] == ["y_0", "y_1", "y_2"] * 2
    assert [device for _, device in seen[:3]] in (["cpu:0/2", "cpu:1/2", "cpu:1/2"], ["cpu:0/2", "cpu:0/2", "cpu:1/2"])


def test_the_steps_of_a_block_with_a_future() -> None:
    given = layers()
    text = MODEL.replace("@parallel(model)", "@parallel(model) @async") + "let z = await y\n"
    np.testing.assert_allclose(tw.load(text).run(**given)["z"], forward(given), rtol=1e-5, atol=1e-5)


def test_weights_are_only_where_their_step_is() -> None:
    given = layers()
    with installed(count=2, mode="random") as driver:
        register_copies(driver)
        text = MODEL.replace("cpu:0/2", "cuda:0").replace("cpu:1/2", "cuda:1")
        np.testing.assert_allclose(np.asarray(tw.load(text).run(**given)["y"]), forward(given), rtol=1e-5, atol=1e-5)


def test_stretches_are_as_even_as_can_be() -> None:
    cpu = find_device("cpu")

    def job(name: str, work: float) -> PlacedJob:
        return PlacedJob(name, work * 1e12, 0.0)

    jobs = [job(f"{n}", work) for n, work in enumerate((1, 1, 1, 5, 1, 3))]
    assert cuts(jobs, [cpu] * 1) == [6]
    assert cuts(jobs, [cpu] * 2) == [4, 6]  # 8 and 4; three and nine would be longer
    assert cuts(jobs, [cpu] * 3) == [3, 4, 6]
    assert cuts(jobs, [cpu] * 6) == [1, 2, 3, 4, 5, 6]


def test_the_command_line_spreads_too(tmp_path: Path) -> None:
    given = layers()
    options: list[str] = []
    for name, array in given.items():
        np.save(tmp_path / f"{name}.npy", array)
        options += ["--in", f"{name}={tmp_path / name}.npy"]
    (tmp_path / "model.zyn").write_text(MODEL)
    done = CliRunner().invoke(cli, ["run", str(tmp_path / "model.zyn"), *options, "--out", f"y={tmp_path / 'y.npy'}"])
    assert done.exit_code == 0, done.output
    assert "ran on cpu:0/2 " in done.output
    assert "cpu:1/2 " in done.output
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), forward(given), rtol=1e-5, atol=1e-5)


def test_rows_that_need_each_other_are_refused_with_their_line() -> None:
    text = PROGRAM.replace("x[i, j] * v[j]", "x[i, j] * (i + j)")
    with pytest.raises(UserError, match="the index 'i' is used as a number") as caught:
        tw.load(text.replace("(x, v)", "(x)")).run(x=np.ones((4, 8), np.float32))
    assert caught.value.diagnostics[0].span.line == 5
