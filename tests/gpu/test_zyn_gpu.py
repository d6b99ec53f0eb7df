"""Every program of examples/zyn on a real GPU, statement by statement and replayed. Skipped where there is none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewright as tw
from tilewright.runtime.cuda import device as cuda
from zyn_cases import CASES, EXAMPLES, Case, block, block_weights, close, numbers

pytestmark = pytest.mark.requires("cuda")
CALLS = 5
"""The first is run statement by statement, the second recorded, the others replayed."""


def on_gpu(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: tw.to_device(value, "cuda:0") if isinstance(value, np.ndarray) else value for name, value in inputs.items()}


def check(case: Case, found: dict[str, Any], inputs: dict[str, Any]) -> None:
    for name, wanted in case.references(inputs).items():
        if isinstance(wanted, list):
            for part, expected in zip(found[name], wanted, strict=True):
                close(part, expected, case.tolerance, name)
        else:
            close(found[name], wanted, case.tolerance, name)


def test_no_program_is_left_out() -> None:
    # tour_parallel names parts of the CPU; the block has a test of its own.
    known = {case.name for case in CASES} | {"transformer_block", "tour_parallel"}
    assert {path.stem for path in EXAMPLES.glob("*.zyn")} <= known


@pytest.mark.parametrize("size", [0, 1], ids=["even", "odd"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_program_with_arrays_of_the_host(case: Case, size: int) -> None:
    inputs = case.inputs(size)
    module = tw.load(case.path)
    for _ in range(3):
        check(case, module.run(device="cuda", **inputs), inputs)


@pytest.mark.parametrize("size", [0, 1], ids=["even", "odd"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_program_with_arrays_of_the_gpu(case: Case, size: int) -> None:
    if case.name == "tour_memory":
        pytest.skip("it moves an array of the host")
    inputs = case.inputs(size)
    given = on_gpu(inputs)
    module = tw.load(case.path)
    results = [module.run(**given) for _ in range(CALLS)]
    for found in results:
        check(case, found, inputs)
    calls = module.repeated(tuple(given))
    assert bool(calls.replays) == case.replayed, calls.obstacle


@pytest.mark.parametrize(("batch", "seq", "heads", "width"), [(2, 24, 4, 8), (1, 67, 2, 16), (3, 77, 2, 64), (2, 128, 4, 64)])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_transformer_block(batch: int, seq: int, heads: int, width: int, dtype: str) -> None:
    hidden = heads * width
    narrow = tw.bf16.numpy if dtype == "bf16" else np.dtype(np.float32)
    layers = [{n: a.astype(narrow) for n, a in block_weights(hidden, 96, seed).items()} for seed in (0, 100)]
    model = {"layers": [{n: tw.to_device(a, "cuda:0") for n, a in layer.items()} for layer in layers]}
    module = tw.load(EXAMPLES / "transformer_block.zyn")
    held = []
    for turn in range(2 * CALLS):
        x = numbers(batch, seq, hidden, seed=turn).astype(narrow)
        found = module.transformer_block(tw.to_device(x, "cuda:0"), turn % 2, model=model, num_heads=heads, head_dim=width)
        held.append((found, x, layers[turn % 2]))
    for found, x, weights in held:
        wide = {n: a.astype(np.float64) for n, a in weights.items()}
        close(found, block(x.astype(np.float64), wide, heads), 5e-2 if dtype == "bf16" else 2e-4)


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


def test_a_graph_sees_other_arrays_and_gives_new_results() -> None:
    module = tw.load(CHAIN)
    weights: dict[str, Any] = {}
    held = []
    for turn in range(40):
        x, gain = numbers(64, 96, seed=turn), numbers(96, seed=turn // 3)
        if turn % 3 == 0:
            weights["gain"] = tw.to_device(gain, "cuda:0")
        held.append((module.chain(tw.to_device(x, "cuda:0"), weights), x, gain))
        del held[: -7 if turn % 5 else -3]
        for found, first, second in held:
            for part, wanted in zip(found, chain(first, second)):
                close(part, wanted, 2e-5)
    calls = module._called("chain", ("x", "w")).repeated(("x", "w"), "result_")
    assert calls.replays[0].__globals__["replay_graph"].__self__.nodes >= 2


def test_a_graph_keeps_the_order_of_streams() -> None:
    module = tw.load(CHAIN)
    gain = numbers(512)
    weights = {"gain": tw.to_device(gain, "cuda:0")}
    inputs = [numbers(256, 512, seed=n) for n in range(4)]
    arrays = [tw.to_device(x, "cuda:0") for x in inputs]
    streams = [tw.Stream("cuda:0") for _ in range(3)]
    results = []
    for turn in range(60):
        with streams[turn % 3]:
            results.append((turn % 4, module.chain(arrays[turn % 4], weights)))
    for number, found in results:
        for part, wanted in zip(found, chain(inputs[number], gain)):
            close(part, wanted, 1e-4)


def test_a_graph_holds_no_input_and_no_result() -> None:
    module = tw.load(CHAIN)
    gpu = cuda.devices()[0]
    gain = {"gain": tw.to_device(numbers(512), "cuda:0")}
    for _ in range(5):
        found = module.chain(tw.to_device(numbers(256, 512), "cuda:0"), gain)
    x = tw.to_device(numbers(256, 512), "cuda:0")
    found = module.chain(x, gain)
    before = gpu.pool.statistics().in_use
    for _ in range(5):
        found = module.chain(x, gain)
    assert gpu.pool.statistics().in_use == before
    held = sum(part.owner.nbytes for part in (x, *found[:2]))
    del x, found
    assert before - gpu.pool.statistics().in_use >= held


def test_tensors_of_pytorch_are_replayed_too() -> None:
    torch = pytest.importorskip("torch")
    module = tw.load(CHAIN)
    for turn in range(6):
        x, gain = numbers(64, 96, seed=turn), numbers(96, seed=turn)
        found = module.chain(torch.from_numpy(x).cuda(), {"gain": torch.from_numpy(gain).cuda()})
        for part, wanted in zip(found, chain(x, gain)):
            close(part.cpu(), wanted, 2e-5)


def test_a_program_inside_a_users_graph() -> None:
    module = tw.load(CHAIN)
    x, gain = numbers(64, 96), numbers(96)
    array, weights = tw.to_device(x, "cuda:0"), {"gain": tw.to_device(gain, "cuda:0")}
    for _ in range(3):
        module.chain(array, weights)
    with tw.capture("cuda:0") as graph:
        found = module.chain(array, weights)
    other = numbers(64, 96, seed=3)
    array.assign(tw.to_device(other, "cuda:0"))
    graph.replay()
    for part, wanted in zip(found, chain(other, gain)):
        close(part, wanted, 2e-5)
