"""Calls of ZynML programs that are made again: recorded, replayed as straight calls on the CPU and as graphs on null GPUs."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest

import tilewright as tw
from null_cuda.install import installed
from tilewright.base.errors import DeviceError, UserError
from tilewright.runtime.cuda import device as cuda
from tilewright.runtime.cuda.parametric_graphs import MOST_EXECUTABLES, ParametricGraph
from tilewright.zyn.host.run import Run
from tilewright.zyn.replay.cache import MOST_REPLAYS, RepeatedCalls

BLOCK = """
pipeline block(x, w: record):
    let a = compute(x, w.gain) { for i in 0..n, j in 0..m: out[i, j] = x[i, j] * w.gain[j] }
    let (p, q) = split(a, 2, axis=-1)
    let turned = reshape(transpose(p), [-1])
    let moved = compute(turned) { for i in 0..k: out[i] = turned[i] + 1.0 }
    return (moved, reshape(q, [-1]), w.name)
"""


def block(x: np.ndarray, gain: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    p, q = np.split(x * gain, 2, axis=-1)
    return p.T.reshape(-1) + 1, q.reshape(-1)


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


@contextmanager
def replays_only() -> Iterator[None]:
    """Nothing is run statement by statement inside."""
    with mock.patch.object(Run, "_statements", side_effect=AssertionError("it runs statement by statement")):
        yield


def calls_of(module: Any, name: str) -> RepeatedCalls:
    params = tuple(p.name for p in module._functions[name].params)
    found: RepeatedCalls = module._called(name, params).repeated(params, "result_")
    return found


def close(found: object, wanted: object) -> None:
    np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), rtol=1e-5, atol=1e-5)


def test_the_third_call_runs_no_statement() -> None:
    module = tw.load(BLOCK)
    for _ in range(2):
        module.block(numbers(4, 6), {"gain": numbers(6), "name": "first"})
    with replays_only():
        for seed in range(3):
            x, gain = numbers(4, 6, seed=seed), numbers(6, seed=seed + 9)
            moved, rest, name = module.block(x, {"gain": gain, "name": "first"})
            close(moved, block(x, gain)[0])
            close(rest, block(x, gain)[1])
            assert name == "first"


def test_an_exchanged_weight_is_seen_and_results_are_new() -> None:
    module, x = tw.load(BLOCK), numbers(4, 6)
    weights: dict[str, Any] = {"gain": numbers(6), "name": ""}
    results = []
    for turn in range(6):
        weights["gain"] = numbers(6, seed=turn)
        results.append((module.block(x, weights)[0], block(x, weights["gain"])[0]))
    for found, wanted in results:
        close(found, wanted)
    weights["gain"][:] = 2
    close(module.block(x, weights)[0], block(x, weights["gain"])[0])


@pytest.mark.parametrize(
    ("x", "gain"),
    [
        (numbers(5, 6), numbers(6)),
        (numbers(4, 8), numbers(8)),
        (numbers(4, 6).astype(np.float64), numbers(6).astype(np.float64)),
        (numbers(6, 4).T, numbers(6)),
        (numbers(4, 12)[:, ::2], numbers(12)[::2]),
    ],
    ids=["rows", "columns", "dtype", "turned", "strided"],
)
def test_inputs_of_other_forms_are_right_too(x: np.ndarray, gain: np.ndarray) -> None:
    module = tw.load(BLOCK)
    for _ in range(3):
        module.block(numbers(4, 6), {"gain": numbers(6), "name": ""})
    for _ in range(3):
        moved, rest, _ = module.block(x, {"gain": gain, "name": ""})
        close(moved, block(x, gain)[0])
        close(rest, block(x, gain)[1])


def test_records_of_other_forms_are_right_too() -> None:
    module = tw.load(BLOCK)
    for _ in range(3):
        module.block(numbers(4, 6), {"gain": numbers(6), "name": "a"})
    assert module.block(numbers(4, 6), {"gain": numbers(6), "name": "b"})[2] == "b"
    assert module.block(numbers(4, 6), {"gain": numbers(6), "name": "a", "more": 1})[2] == "a"
    with pytest.raises(UserError, match="no 'gain' in this record"):
        module.block(numbers(4, 6), {"gains": numbers(6), "name": "a"})
    with pytest.raises(UserError, match="gain"):
        module.block(numbers(4, 6), {"gain": numbers(5), "name": "a"})


def test_one_array_for_two_inputs_is_no_rule() -> None:
    module = tw.load("fn add(x, y): return compute(x, y) { for i in 0..n: out[i] = x[i] + 2.0 * y[i] }\n")
    x, y = numbers(7), numbers(7, seed=1)
    for _ in range(3):
        close(module.add(x, x), 3 * x)
    for _ in range(3):
        close(module.add(x, y), x + 2 * y)
    close(module.add(y, y), 3 * y)


def test_numbers_are_part_of_the_form() -> None:
    module = tw.load("fn scale(x, by, times: int = 1): return compute(x, by) { for i in 0..n: out[i] = x[i] * by } * times\n")
    x = numbers(7)
    for by in (2.0, 2.0, 2.0, 3.0, 2.0, 3.0, 3.0, 2):
        close(module.scale(x, by), x * by)
    for by in (0.0, 0.0, 0.0, -0.0, 0.0):
        assert np.array_equal(np.signbit(module.scale(x, by)), np.signbit(x * np.float32(by)))
    for times in (1, 1, 1, 5, 1):
        close(module.scale(x, 2.0, times=times), x * 2 * times)
    for _ in range(3):
        assert np.isnan(module.scale(x, float("nan"))).all()


def test_numbers_that_kernels_compute_go_to_kernels() -> None:
    module = tw.load("fn shares(x):\n    let total = reduce(+, x)\n    return (x / total, total)\n")
    for seed in range(4):
        x = np.abs(numbers(9, seed=seed))
        found, total = module.shares(x)
        close(found, x / x.sum())
        assert type(total) is np.float32
        assert abs(total - x.sum()) < 1e-4
    assert len(calls_of(module, "shares").replays) == 1


def test_numbers_that_kernels_compute_are_computed_with() -> None:
    text = "let t = reduce(+, x)\nlet u = sqrt(t) * 2.0 + 1.0\nlet y = x * u\nlet where = compute(x) { @kernel reduce(argmax)\n for i in 0..n: yield (x[i], i) }\n"
    module = tw.load(text)
    for seed in range(5):
        x = np.abs(numbers(9, seed=seed))
        found = module.run(x=x)
        close(found["u"], np.sqrt(x.sum()) * 2 + 1)
        close(found["y"], x * (np.sqrt(x.sum()) * 2 + 1))
        assert found["where"] == x.argmax()
        assert [type(found[name]) for name in ("t", "u", "where")] == [type(tw.load(text).run(x=x)[name]) for name in ("t", "u", "where")]
    assert len(module.repeated(("x",)).replays) == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("var y = x\nif reduce(+, x) > 0.0:\n    y = x + 1.0\n", "decides what is done"),
        ("let t = max(reduce(max, x), 0.0)\nlet y = x * 2.0 if t else x\n", "decides what is done"),
        ("let t = compute(x) { @kernel reduce(argmax)\n for i in 0..n: yield (x[i], i) }\nlet y = compute(x, t) { for i in 0..n: out[i] = x[i] * cast(t, f32) }\n", "goes to another"),
        ("let t = x[0]\nlet y = x + t\n", "an element of an array becomes a number"),
        ("var y = x\nwhile y[0] < 10.0:\n    y = y * 2.0\n", "an element of an array becomes a number"),
        ("let s = zeros([2])\nlet y = concat([x, full([1], reduce(max, x))])\n", "used on the host"),
        ('print("here")\nlet y = x + 1.0\n', "print"),
        ("let f = compute(x) @async { for i in 0..n: out[i] = x[i] + 1.0 }\nlet y = await f\n", "asynchronous"),
    ],
    ids=["condition", "choice", "whole number", "element", "loop", "filled", "print", "async"],
)
def test_what_depends_on_values_or_does_more_runs_as_before(text: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = tw.load(text)
    inputs = [np.abs(numbers(5)) + 1, -np.abs(numbers(5, seed=1)), np.abs(numbers(5, seed=2)) * 100 + 1]
    if "while" in text:
        inputs[1] = -inputs[1] + 1
    for turn in range(6):
        x = inputs[turn % 3]
        close(module.run(x=x)["y"], tw.load(text).run(x=x)["y"])
    calls = module.repeated(("x",))
    assert calls.replays == []
    assert reason in calls.obstacle
    assert capsys.readouterr().out.count("here") == (12 if "print" in text else 0)


def test_lists_of_layers_and_top_level_runs() -> None:
    module = tw.load("var y = x\nfor w in layers:\n    y = compute(y, w) { for i in 0..n, j in 0..m: out[i, j] = dot(y[i], w[j]) }\n")
    layers = [numbers(6, 6, seed=s) for s in range(3)]

    def wanted(x: np.ndarray) -> np.ndarray:
        for w in layers:
            x = x @ w.T
        return x

    for seed in range(2):
        close(module.run(x=numbers(4, 6, seed=seed), layers=layers)["y"], wanted(numbers(4, 6, seed=seed)))
    with replays_only():
        found = module.run(x=numbers(4, 6, seed=5), layers=layers)
        close(found["y"], wanted(numbers(4, 6, seed=5)))
        assert list(found) == ["y"]
    layers.append(numbers(6, 6, seed=8))
    for seed in range(3):
        close(module.run(x=numbers(4, 6, seed=seed), layers=layers)["y"], wanted(numbers(4, 6, seed=seed)))


def test_one_record_in_two_places_is_no_rule_and_others_do_not_count() -> None:
    module = tw.load("fn f(x, a: record, b: record, other: list):\n    return (compute(x) { for i in 0..n: out[i] = x[i] }, a.w, b.w)\n")
    x, one, two = numbers(3), {"w": numbers(3)}, {"w": numbers(3, seed=2), "unused": numbers(4)}
    for _ in range(3):
        _, first, second = module.f(x, one, one, [])
        assert first is one["w"]
        assert second is one["w"]
    for _ in range(3):
        _, first, second = module.f(x, one, two, [])
        assert first is one["w"]
        assert second is two["w"]
    two["unused"] = numbers(7)
    with replays_only():
        assert module.f(x, one, two, [])[2] is two["w"]


def test_a_function_may_have_the_name_of_a_method() -> None:
    module = tw.load("fn run(x): return compute(x) { for i in 0..n: out[i] = x[i] + 1.0 }\nlet y = 2\n")
    for _ in range(3):
        close(module.call("run", (numbers(3),), {}), numbers(3) + 1)
    assert module.run() == {"y": 2}


def test_the_device_is_part_of_the_form() -> None:
    module, x = tw.load(BLOCK), numbers(4, 6)
    weights = {"gain": numbers(6), "name": ""}
    for device in ("cpu", "emulator", "cpu", "emulator", "cpu", "emulator", None):
        close(module.block(x, weights, device=device)[0], block(x, weights["gain"])[0])
    with pytest.raises(DeviceError):
        module.block(x, weights, device="cuda:7")


def test_only_so_many_forms_are_kept() -> None:
    module = tw.load("fn f(x): return compute(x) { for i in 0..n: out[i] = x[i] + 1.0 }\n")
    for n in range(1, MOST_REPLAYS + 9):
        for _ in range(2):
            close(module.f(numbers(n)), numbers(n) + 1)
    assert len(calls_of(module, "f").replays) == MOST_REPLAYS
    with replays_only():
        for n in (MOST_REPLAYS, MOST_REPLAYS - 3, MOST_REPLAYS):
            close(module.f(numbers(n)), numbers(n) + 1)


def test_nothing_is_held_after_a_call() -> None:
    module = tw.load(BLOCK)
    x, gain = numbers(4, 6), numbers(6)
    for _ in range(4):
        result = module.block(x, {"gain": gain, "name": ""})[0]
    held = [weakref.ref(a) for a in (x, gain, result)]
    del x, gain, result
    gc.collect()
    assert [ref() is None for ref in held] == [True] * 3


def test_threads_share_replays() -> None:
    module, failures = tw.load(BLOCK), []

    def work(seed: int) -> None:
        try:
            for turn in range(30):
                x, gain = numbers(4 + turn % 2, 6, seed=seed + turn), numbers(6, seed=seed)
                close(module.block(x, {"gain": gain, "name": ""})[0], block(x, gain)[0])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(100 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_program_is_part_of_a_users_graph_and_of_a_profile() -> None:
    module = tw.load("fn f(x): return compute(x) { for i in 0..n: out[i] = x[i] + 1.0 }\n")
    x = numbers(6)
    for _ in range(3):
        module.f(x)
    graph = tw.graph(module.f, x)
    x += 5
    close(graph.replay(), x + 1)
    with tw.profile() as seen:
        module.f(x)
    assert len(seen.calls) == 1


# -- on null GPUs -----------------------------------------------------------------------------------------------------

CHAIN = """
pipeline chain(x, w: record):
    let a = compute(x, w.gain) { for i in 0..n, j in 0..m: out[i, j] = x[i, j] * w.gain[j] }
    let b = compute(a, x) { for i in 0..n: out[i] = reduce(+, a[i]) + x[i, 0] }
    let (p, q) = split(a, 2, axis=-1)
    let r = transpose(p)
    return (compute(b, r) { for i in 0..k, j in 0..n: out[i, j] = r[i, j] + b[j] }, reshape(b, [2, -1]), x)
"""


def chain(x: np.ndarray, gain: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    a = x * gain
    b = a.sum(1) + x[:, 0]
    return a[:, : a.shape[1] // 2].T + b, b.reshape(2, -1)


def dev(array: np.ndarray) -> Any:
    return tw.to_device(array, "cuda:0")


def graph_of(calls: RepeatedCalls) -> ParametricGraph:
    found: ParametricGraph = calls.replays[0].__globals__["replay_graph"].__self__
    return found


def check_chain(found: Any, x: np.ndarray, gain: np.ndarray) -> None:
    for part, wanted in zip(found, chain(x, gain)):
        np.testing.assert_allclose(part.numpy(), wanted, rtol=1e-5, atol=1e-5)


def test_a_pipeline_becomes_a_graph_with_new_results_each_time() -> None:
    with installed() as driver:
        module = tw.load(CHAIN)
        held = []
        for turn in range(9):
            x, gain = numbers(4, 8, seed=turn // 2), numbers(8, seed=turn // 3)
            on_gpu = dev(x), {"gain": dev(gain)}
            before = len(driver.programs.launched)
            found = module.chain(*on_gpu)
            held.append((found, x, gain, on_gpu))
            launches = len(driver.programs.launched) - before
            assert launches <= 3
            assert found[2] is on_gpu[0]
        for found, x, gain, _ in held:
            check_chain(found, x, gain)
        ported = graph_of(calls_of(module, "chain"))
        assert ported.nodes == launches >= 2
        assert len(ported._ready) == MOST_EXECUTABLES


def test_a_graph_is_one_launch_and_sets_nothing_for_known_addresses() -> None:
    with installed() as driver:
        module = tw.load(CHAIN)
        x, gain = numbers(4, 8), numbers(8)
        args = dev(x), {"gain": dev(gain)}
        found = None
        for _ in range(6):
            found = module.chain(*args)
        before = driver.counts.copy()
        for _ in range(4):
            found = module.chain(*args)
        assert driver.counts - before == {"cuGraphLaunch": 4, "cuCtxGetCurrent": 4}
        check_chain(found, x, gain)


def test_other_strides_run_as_single_calls_and_streams_are_kept_in_order() -> None:
    with installed(mode="random", seed=5):
        module = tw.load(CHAIN)
        x, gain = numbers(4, 8), numbers(8)
        weights = {"gain": dev(gain)}
        for _ in range(3):
            module.chain(dev(x), weights)
        turned = dev(np.ascontiguousarray(x.T)).transpose()
        check_chain(module.chain(turned, weights), x, gain)
        results = []
        for turn in range(6):
            with tw.Stream("cuda:0"):
                results.append(module.chain(dev(x + turn), weights))
        for turn, found in enumerate(results):
            check_chain(found, x + turn, gain)


def test_a_graph_holds_no_memory_of_its_inputs_and_results() -> None:
    with installed():
        module = tw.load(CHAIN)
        gpu = cuda.devices()[0]
        x, weights = dev(numbers(4, 8)), {"gain": dev(numbers(8))}
        for _ in range(5):
            found = module.chain(x, weights)
        before = gpu.pool.statistics().in_use
        large = dev(numbers(4, 8))
        one = gpu.pool.statistics().in_use - before
        del x, weights, found, large
        gc.collect()
        assert before - gpu.pool.statistics().in_use >= 4 * one


def test_a_freed_input_is_refused() -> None:
    with installed():
        module = tw.load(CHAIN)
        x, weights = dev(numbers(4, 8)), {"gain": dev(numbers(8))}
        for _ in range(4):
            module.chain(x, weights)
        x.free()
        with pytest.raises(DeviceError, match="after it was freed"):
            module.chain(x, weights)


def test_a_driver_that_cannot_capture_leaves_single_calls() -> None:
    with installed() as driver:
        module = tw.load(CHAIN)
        x, gain = numbers(4, 8), numbers(8)
        driver.fail["cuGraphInstantiate"] = 2
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(4):
                check_chain(module.chain(dev(x), {"gain": dev(gain)}), x, gain)
        assert len(said) == 1 and "runs as single calls: error[TW032]: cuGraphInstantiate" in str(said[0].message)
        assert "replay_graph" not in calls_of(module, "chain").replays[0].__globals__


def test_threads_replay_one_graph() -> None:
    with installed():
        module, failures = tw.load(CHAIN), []
        gain = numbers(8)
        weights = {"gain": dev(gain)}
        for _ in range(3):
            module.chain(dev(numbers(4, 8)), weights)

        def work(seed: int) -> None:
            try:
                for turn in range(5):
                    x = numbers(4, 8, seed=seed + turn)
                    with tw.Stream("cuda:0"):
                        check_chain(module.chain(dev(x), weights), x, gain)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(10 * n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
