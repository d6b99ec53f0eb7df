"""Blocks at the top level of a program are one program, as those of a pipeline are: what runs, what it gives, and when it has to run earlier."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import tilewright as tw
from tilewright.base.target import host_cpu
from tilewright.cli.main import cli
from tilewright.compile.driver import compile_stages
from tilewright.execute.calls.run import Runner
from tilewright.execute.devices import find_device
from tilewright.tree.block_graph import BlockGraph
from tilewright.tree.syntax import Function
from tilewright.zyn import module
from tilewright.zyn.host.block_runner import BlockRunner

CHAIN = """\
let a = compute(x) { for i in 0..n, j in 0..m: out[i, j] = x[i, j] * 2.0 }
let b = compute(a) { for i in 0..n, j in 0..m: out[i, j] = exp(a[i, j]) }
let c = compute(b, w) { for i in 0..n, j in 0..m: out[i, j] = b[i, j] + w[j] }
"""


class Noted(BlockRunner):
    """Runs blocks as `tw.load` does; keeps what ran and with what, and how many kernels it launched."""

    takes_futures = joins_blocks = True

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.kernels: list[int] = []

    def __call__(self, function: Function, arguments: dict[str, object], device: str) -> object:
        runner = Runner(function)
        read = runner.arguments(arguments, False)
        done = compile_stages(function, runner.signature(read, False), host_cpu())
        self.ran.append(
            " + ".join(p.function.name for p in function.parts) if isinstance(function, BlockGraph) else function.name
        )
        self.kernels.append(len(done.stages.thread.calls))
        return runner.run(arguments, find_device("cpu"))


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def run(text: str, *wanted: str, **inputs: object) -> tuple[dict[str, object], Noted]:
    noted = Noted()
    loaded = module.load(text, noted)
    return (loaded.giving(*wanted) if wanted else loaded).run(**inputs), noted


def as_pipeline(text: str, inputs: str, result: str) -> str:
    return (
        f"pipeline p({inputs}):\n" + "".join(f"    {line}\n" for line in text.splitlines()) + f"    return {result}\n"
    )


def test_blocks_that_feed_each_other_are_one_kernel_and_all_results_are_there() -> None:
    x, w = numbers(33, 20), numbers(20, seed=1)
    found, noted = run(CHAIN, x=x, w=w)
    assert noted.ran == ["a + b + c"] and noted.kernels == [1]
    a = x.astype(np.float64) * 2
    for name, wanted in (("a", a), ("b", np.exp(a)), ("c", np.exp(a) + w)):
        np.testing.assert_allclose(found[name], wanted, rtol=2e-6, atol=1e-6)
        assert isinstance(found[name], np.ndarray)


@pytest.mark.parametrize(
    ("wanted", "result"),
    [(("a", "b", "c"), "{ a: a, b: b, c: c }"), (("c",), "{ c: c }"), (("a", "c"), "{ a: a, c: c }")],
)
def test_the_kernels_are_those_of_a_pipeline_with_the_same_blocks(wanted: tuple[str, ...], result: str) -> None:
    x, w = numbers(7, 40), numbers(40, seed=1)
    _, noted = run(CHAIN, *wanted, x=x, w=w)
    inside = Noted()
    module.load(as_pipeline(CHAIN, "x, w", result), inside).p(x, w)
    assert noted.ran == inside.ran == ["a + b + c"] and noted.kernels == inside.kernels


SOFTMAX = """\
let top = compute(x) { for i in 0..n:
    var t = -inf
    for j in 0..m: t = max(t, x[i, j])
    out[i] = t
}
let e = compute(x, top) { for i in 0..n, j in 0..m: out[i, j] = exp(x[i, j] - top[i]) }
let total = compute(e) { for i in 0..n:
    var t = 0.0
    for j in 0..m: t += e[i, j]
    out[i] = t
}
let y = compute(e, total) { for i in 0..n, j in 0..m: out[i, j] = e[i, j] / total[i] }
"""


def test_names_that_nobody_wants_need_not_be_written() -> None:
    x = numbers(9, 70)
    found, noted = run(SOFTMAX, "y", x=x)
    everything, all_noted = run(SOFTMAX, x=x)
    assert list(found) == ["y"] and noted.ran == all_noted.ran == ["top + e + total + y"]
    assert noted.kernels[0] < all_noted.kernels[0]
    e = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    np.testing.assert_allclose(found["y"], e / e.sum(1, keepdims=True), rtol=1e-5)
    np.testing.assert_allclose(everything["y"], e / e.sum(1, keepdims=True), rtol=1e-5)
    np.testing.assert_allclose(everything["e"], e, rtol=1e-5)


def test_blocks_that_no_wanted_name_needs_do_not_run() -> None:
    text = CHAIN + "let other = compute(x) { for i in 0..n, j in 0..m: out[i, j] = x[i, j] - 1.0 }\n"
    found, noted = run(text, "other", x=numbers(4, 4), w=numbers(4))
    assert list(found) == ["other"] and noted.ran == ["other"]


def test_a_value_that_is_overwritten_is_no_result() -> None:
    text = """\
var y = compute(x) { for i in 0..n: out[i] = x[i] * 2.0 }
y = compute(y) { for i in 0..n: out[i] = y[i] + 1.0 }
y = compute(y) { for i in 0..n: out[i] = y[i] * y[i] }
"""
    x = numbers(50)
    found, noted = run(text, x=x)
    np.testing.assert_allclose(found["y"], (x.astype(np.float64) * 2 + 1) ** 2, rtol=1e-6)
    assert noted.kernels == [1]


@pytest.mark.parametrize(
    "observes",
    [
        "print(a)",
        "if reduce(+, b) > 0.0 { print(1) }",
        "let first = a[0]",
        "let total = reduce(+, a)\nlet k = total + 1.0",
    ],
)
def test_what_is_observed_runs_first(observes: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = f"""\
let a = compute(x) {{ for i in 0..n: out[i] = x[i] * 2.0 }}
let b = compute(a) {{ for i in 0..n: out[i] = a[i] + 1.0 }}
{observes}
let c = compute(b) {{ for i in 0..n: out[i] = b[i] * 3.0 }}
"""
    x = np.array([1, 2, 4], np.float32)
    found, noted = run(text, x=x)
    np.testing.assert_array_equal(found["c"], (x * 2 + 1) * 3)
    assert "b" in noted.ran[0].split(" + ") and noted.ran[-1].split(" + ")[-1] == "c" and len(noted.ran) > 1
    if observes == "print(a)":
        assert capsys.readouterr().out == "[2., 4., 8.]\n" and noted.ran == ["a + b", "c"]


def test_parts_that_are_assigned_are_seen_by_later_blocks_alone() -> None:
    text = """\
var a = compute(x) { for i in 0..n: out[i] = x[i] * 2.0 }
let b = compute(a) { for i in 0..n: out[i] = a[i] + 1.0 }
let same = a
a[0] = 100.0
let c = compute(a) { for i in 0..n: out[i] = a[i] + 1.0 }
"""
    x = np.array([1, 2, 3], np.float32)
    found, _ = run(text, x=x)
    np.testing.assert_array_equal(found["b"], [3, 5, 7])
    np.testing.assert_array_equal(found["same"], [2, 4, 6])
    np.testing.assert_array_equal(found["a"], [100, 4, 6])
    np.testing.assert_array_equal(found["c"], [101, 5, 7])
    np.testing.assert_array_equal(x, [1, 2, 3])


def test_an_input_that_is_changed_is_read_before() -> None:
    text = """\
var y = x
let a = compute(y) { for i in 0..n: out[i] = y[i] * 2.0 }
y[0] = 50.0
let b = compute(y) { for i in 0..n: out[i] = y[i] * 2.0 }
"""
    x = np.array([1, 2, 3], np.float32)
    found, _ = run(text, x=x)
    np.testing.assert_array_equal(found["a"], [2, 4, 6])
    np.testing.assert_array_equal(found["b"], [100, 4, 6])
    np.testing.assert_array_equal(x, [1, 2, 3])


def test_a_block_that_writes_in_place_comes_after_those_that_read_before() -> None:
    text = """\
let a = compute(x) { for i in 0..n: out[i] = x[i] * 2.0 }
compute(inout x) { for i in 0..n: x[i] = x[i] + 10.0 }
let b = compute(x) { for i in 0..n: out[i] = x[i] * 2.0 }
"""
    x = np.array([1, 2, 3], np.float32)
    found, _ = run(text, x=x)
    np.testing.assert_array_equal(found["a"], [2, 4, 6])
    np.testing.assert_array_equal(found["b"], [22, 24, 26])
    np.testing.assert_array_equal(x, [11, 12, 13])


def test_turns_of_a_loop_are_one_program_each_and_the_same_one() -> None:
    text = """\
var y = compute(x) { for i in 0..n: out[i] = x[i] * 1.0 }
for t in 0..40 {
    let half = compute(y) { for i in 0..n: out[i] = y[i] * 0.5 }
    y = compute(half) { for i in 0..n: out[i] = half[i] + 1.0 }
}
let z = compute(y) { for i in 0..n: out[i] = y[i] + 1.0 }
"""
    x = numbers(6)
    found, noted = run(text, x=x)
    wanted = x.astype(np.float64)
    for _ in range(40):
        wanted = wanted * 0.5 + 1
    np.testing.assert_allclose(found["z"], wanted + 1, rtol=1e-6)
    assert noted.ran == ["y", *["half + y"] * 40, "z"] and set(noted.kernels) == {1}


def test_errors_are_at_the_lines_of_their_blocks() -> None:
    good = CHAIN.replace("w[j]", "w[j + 1]")
    with pytest.raises(tw.UserError, match=r"<string>:3:") as failed:
        run(good, x=numbers(3, 4), w=numbers(4))
    assert "'w'" in str(failed.value)
    outside = """\
let a = compute(x) { for i in 0..n: out[i] = x[i] * 2.0 }
let b = compute(a, at) {
    for i in 0..n:
        out[i] = a[at[i]]
}
"""
    with pytest.raises(tw.TilewrightError, match=r"<string>:4:"):
        run(outside, x=numbers(4), at=np.array([0, 1, 9, 2], np.int32))


def test_runs_are_recorded_and_say_what_was_launched() -> None:
    loaded = tw.load(CHAIN)
    x, w = numbers(5, 8), numbers(8, seed=1)
    for scale in (1, 2, 3, 4):
        found = loaded.run(device="cpu", x=x * scale, w=w)
        np.testing.assert_allclose(found["c"], np.exp(x.astype(np.float64) * scale * 2) + w, rtol=2e-6, atol=1e-6)
    assert loaded.repeated(("x", "w")).replays
    (launched,) = loaded.launched()
    assert launched.blocks == ("a", "b", "c") and len(launched.kernels) == 1
    assert str(launched).startswith("a + b + c: 1 kernel on ")
    kept = found["a"]
    loaded.run(device="cpu", x=x, w=w)
    np.testing.assert_allclose(kept, x * 8, rtol=1e-6)  # results are new arrays each time


def test_names_that_the_program_does_not_define() -> None:
    loaded = tw.load(
        CHAIN.replace("let b", "let below").replace("(b, w)", "(below, w)").replace("b[i, j] + w", "below[i, j] + w")
    )
    with pytest.raises(tw.UserError, match="defines no 'belows'") as failed:
        loaded.giving("belows")
    assert "did you mean 'below'?" in str(failed.value)
    with pytest.raises(tw.UserError, match="without names"):
        loaded.giving()
    assert list(loaded.giving("c").run(device="cpu", x=numbers(2, 2), w=numbers(2))) == ["c"]


@pytest.mark.parametrize("arguments", ["", "x=f32[64,128] w=f32[128]"])
def test_inspect_shows_the_program_and_what_stays_apart(tmp_path: Path, arguments: str) -> None:
    file = tmp_path / "chain.zyn"
    file.write_text(CHAIN + "print(c)\nlet d = compute(c) { for i in 0..n, j in 0..m: out[i, j] = c[i, j] * 0.5 }\n")
    done = CliRunner().invoke(cli, ["inspect", str(file), "--fusion", "--json", "--target", "cpu", "--args", arguments])
    assert done.exit_code == 0, done.output
    program, last = json.loads(done.output)
    assert (program["name"], program["before"], program["after"]) == ("program", 3, 1)
    assert {f["array"] for f in program["fused"]} == {"a", "b"} and last["name"] == "d"
    assert [tuple(f[key].rsplit(":", 2)[1] for key in ("made", "used")) for f in program["fused"]] == [
        ("1", "2"),
        ("2", "3"),
    ]
