"""The programs in examples/zyn against float64 references and PyTorch, on the CPU, in the emulator, and on a GPU where there is one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewright as tw
from copy_kernels import register_copies
from null_cuda.install import installed
from tilewright.runtime.cpu import pool as cpu_pool
from tour_cases import PATH, load_module, load_tours

EXAMPLES = PATH.parent / "zyn"
DEVICES = ("cpu", "emulator", pytest.param("cuda", marks=pytest.mark.requires("cuda")))
TOURS = {tour.name: tour for tour in load_tours()}
softmax, gelu = load_module().softmax, load_module().gelu


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


def run(name: str, device: str, **inputs: Any) -> dict[str, Any]:
    return tw.load(EXAMPLES / f"{name}.zyn").run(device=device, **inputs)


def close(found: object, wanted: object, tolerance: float = 1e-5) -> None:
    if isinstance(wanted, list):
        for one, other in zip(found, wanted, strict=True):  # type: ignore[call-overload]
            close(one, other, tolerance)
        return
    wide = np.asarray(wanted, np.float64)
    np.testing.assert_allclose(np.asarray(found, np.float64), wide, rtol=tolerance, atol=tolerance * max(1.0, float(np.abs(wide).max())))


def needs_cores(name: str) -> None:
    if name == "tour_parallel" and len(cpu_pool.usable_cores()) < 2:
        pytest.skip("one core has no parts")


@pytest.mark.parametrize("size", [40, 1500])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", TOURS)
def test_tours(name: str, device: str, size: int) -> None:
    needs_cores(name)
    tour = TOURS[name]
    inputs = tour.make(np.random.default_rng(0), size)
    found, wanted = tour.run(inputs, device), tour.reference(inputs)
    for result, value in wanted.items():
        close(found[result], value, tour.tolerance)


@pytest.mark.parametrize("name", TOURS)
def test_tours_as_pytorch_computes_them(name: str) -> None:
    torch = pytest.importorskip("torch")
    needs_cores(name)
    tour = TOURS[name]
    assert tour.same
    inputs = tour.make(np.random.default_rng(1), 800)
    tensors = as_tensors(torch, inputs)
    found = tour.run(inputs, "cpu")
    for result, function in tour.same.items():
        close(found[result], function(torch, tensors).numpy(), tour.tolerance)


def as_tensors(torch: Any, value: Any) -> Any:
    if isinstance(value, dict):
        return {name: as_tensors(torch, part) for name, part in value.items()}
    if isinstance(value, list):
        return [as_tensors(torch, part) for part in value]
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def test_pytorch_has_the_operations_of_the_document() -> None:
    """All but the rotation, which it has no function for, and what is about devices, futures and memory."""
    left = {(tour.name, result) for tour in TOURS.values() for result in tour.reference(tour.make(np.random.default_rng(0), 40))}
    left -= {(tour.name, result) for tour in TOURS.values() for result in tour.same}
    assert left == {
        ("tour_elementwise", "rotated"), ("tour_devices", "gpu_result"), ("tour_devices", "cpu_result"), ("tour_parallel", "forward"),
        ("tour_async", "result_now"), ("tour_async", "in_time"), ("tour_async", "results"), ("tour_memory", "shared_sum"),
    }  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
def test_devices(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = run("tour_devices", device, data=numbers(9, 12), weights=numbers(12, 7))
    assert [d["id"] for d in found["devices"]] == [d.id for d in tw.devices()]
    assert found["gpus"] == sum(d.kind == "cuda" for d in tw.devices())
    assert capsys.readouterr().out.startswith("cpu cpu ")


@pytest.mark.parametrize("device", DEVICES)
def test_async(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    data, batches = numbers(33), [numbers(20, seed=n) for n in range(3)]
    given = {f"batch{n + 1}": b for n, b in enumerate(batches)}
    found = run("tour_async", device, data=data, default_value=0.0, **given)
    assert found["cpu_work"] == {"count": 33, "half": 16}
    assert capsys.readouterr().out == "working on 33 elements\n"
    close(found["first"], batches[found["index"]].astype(np.float64) + found["index"] + 1)


@pytest.mark.parametrize("place", ["cpu", "emulator", "null GPU"])
def test_memory(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    data = numbers(40)

    def check(device: str) -> None:
        found = run("tour_memory", device, data=data)
        assert isinstance(found["cpu_data"], np.ndarray)
        close(found["cpu_data"], data.astype(np.float64) * 2)
        close(found["shared_sum"], data.astype(np.float64).sum() * 2, 1e-4)
        assert found["gpu_tensor"].shape == (1024, 1024)

    if place != "null GPU":
        check(place)
        return
    with installed(mode="random"):
        check("cuda")
    assert capsys.readouterr().out == "pinned (1024, 1024)\npooled (512, 512) (256, 256)\n"


def block_reference(x: np.ndarray, weights: dict[str, np.ndarray], heads: int) -> Any:
    given = {"x": x, "layer": 0, "model": {"layers": [weights]}, "num_heads": heads, "head_dim": x.shape[-1] // heads}
    return TOURS["transformer_block"].reference(given)["transformer_block"]


def block_weights(hidden: int, inner: int, seed: int) -> dict[str, np.ndarray]:
    return load_module().weights_of_a_block(np.random.default_rng(seed), hidden, inner)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("batch", "seq", "heads", "width"), [(2, 24, 4, 8), (1, 67, 2, 16)])
@pytest.mark.parametrize("device", DEVICES)
def test_transformer_block_of_other_sizes(device: str, batch: int, seq: int, heads: int, width: int) -> None:
    hidden = heads * width
    model = {"layers": [block_weights(hidden, 48, seed) for seed in (0, 100)]}
    x = numbers(batch, seq, hidden)
    module = tw.load(EXAMPLES / "transformer_block.zyn")
    for layer in range(2):
        found = module.transformer_block(x, layer, model=model, num_heads=heads, head_dim=width, device=device)
        close(found, block_reference(x, model["layers"][layer], heads), 2e-5)


def test_transformer_block_with_everything_on_a_gpu() -> None:
    """The views and copies between its blocks are of arrays on the GPU."""
    weights, x = block_weights(16, 24, 0), numbers(2, 12, 16)
    with installed(mode="random") as driver:
        register_copies(driver)
        model = {"layers": [{name: tw.to_device(array, "cuda") for name, array in weights.items()}]}
        module = tw.load(EXAMPLES / "transformer_block.zyn")
        given, before = tw.to_device(x, "cuda"), len(driver.programs.launched)
        found = module.transformer_block(given, 0, model=model, num_heads=2, head_dim=8)
        assert not isinstance(found, np.ndarray)
        close(found.numpy(), block_reference(x, weights, 2), 2e-5)
        assert len(driver.programs.launched) - before == 7  # nothing is copied between them


def test_transformer_block_names_sizes_that_disagree() -> None:
    model = {"layers": [block_weights(32, 48, 0)]}
    module = tw.load(EXAMPLES / "transformer_block.zyn")
    with pytest.raises(tw.UserError, match=r"shape \[2, 8, 32\] \(512 elements\) cannot have shape \[2, 8, 4, 16\]"):
        module.transformer_block(numbers(2, 8, 32), 0, model=model, num_heads=4, head_dim=16)
    with pytest.raises(tw.UserError, match=r"'x' has rank 2 \(shape \[8, 32\]\), its type rank 3"):
        module.transformer_block(numbers(8, 32), 0, model=model, num_heads=4, head_dim=8)
