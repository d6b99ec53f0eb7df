"""The programs in examples/zyn against float64 references, on the CPU, in the emulator, and on a GPU where there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewright as tw
from copy_kernels import register_copies
from null_cuda.install import installed

EXAMPLES = Path(__file__).parents[2] / "examples" / "zyn"
DEVICES = ("cpu", "emulator", pytest.param("cuda", marks=pytest.mark.requires("cuda")))


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


def run(name: str, device: str, **inputs: Any) -> dict[str, Any]:
    return tw.load(EXAMPLES / f"{name}.zyn").run(device=device, **inputs)


def close(found: object, wanted: object, tolerance: float = 1e-5) -> None:
    wide = np.asarray(wanted, np.float64)
    np.testing.assert_allclose(np.asarray(found, np.float64), wide, rtol=tolerance, atol=tolerance * max(1.0, float(np.abs(wide).max())))


def wide(*arrays: np.ndarray) -> list[np.ndarray]:
    return [a.astype(np.float64) for a in arrays]


def softmax(x: np.ndarray, axis: int | None = -1) -> np.ndarray:
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def gelu(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1 + np.tanh(0.7978845608 * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("device", DEVICES)
def test_elementwise(device: str) -> None:
    x, matrix, vector, heads = numbers(37), numbers(5, 9), numbers(9), numbers(2, 3, 5, 8)
    angles = np.arange(20).reshape(5, 4) / 7
    c, s = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    found = run("tour_elementwise", device, x=x, matrix=matrix, vector=vector, heads_in=heads, cos_cache=c, sin_cache=s)
    a, m, v, h, cw, sw = wide(x, matrix, vector, heads, c, s)
    close(found["y"], np.maximum(a, 0))
    close(found["z"], a * np.maximum(a, 0) + 1)
    close(found["scaled"], m * v)
    close(found["activated"], gelu(a))
    turned = np.stack([h[..., ::2] * cw - h[..., 1::2] * sw, h[..., ::2] * sw + h[..., 1::2] * cw], -1).reshape(h.shape)
    close(found["rotated"], turned)


@pytest.mark.parametrize("device", DEVICES)
def test_reductions(device: str) -> None:
    data, matrix = numbers(1001), numbers(7, 130)
    found = run("tour_reductions", device, data=data, matrix=matrix)
    d, m = wide(data, matrix)
    close(found["sum"], d.sum(), 1e-4)
    assert found["max_val"] == data.max()
    close(found["norm"], np.sqrt((d * d).sum()))
    close(found["row_sums"], m.sum(1), 1e-4)
    assert found["max_idx"] == data.argmax()


@pytest.mark.parametrize("device", DEVICES)
def test_matrices(device: str) -> None:
    A, B, P, Q = numbers(17, 23), numbers(23, 19), numbers(2, 9, 11), numbers(2, 11, 6)
    image, kernel, bias, windows = numbers(2, 3, 9, 8), numbers(4, 3, 3, 3), numbers(4), numbers(3, 3, 3)
    found = run("tour_matrices", device, A=A, B=B, P=P, Q=Q, input=image, kernel=kernel, bias=bias, windows=windows)
    a, b, p, q, i, k, c, w = wide(A, B, P, Q, image, kernel, bias, windows)
    close(found["C"], a @ b)
    close(found["batched"], p @ q)
    padded = np.pad(i, ((0, 0), (0, 0), (1, 1), (1, 1)))
    views = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))[:, :, ::2, ::2]
    close(found["output"], np.einsum("bihwyx,oiyx->bohw", views, k) + c[:, None, None])
    views = np.lib.stride_tricks.sliding_window_view(i, (3, 3), (2, 3))
    close(found["filtered"], np.einsum("bchwyx,cyx->bchw", views, w))


@pytest.mark.parametrize("seq", [24, 70])
@pytest.mark.parametrize("device", DEVICES)
def test_attention(device: str, seq: int) -> None:
    q, k, v = (numbers(2, 2, seq, 8, seed=n) for n in range(3))
    mask = np.tril(np.ones((seq, seq), bool))
    found = run("tour_attention", device, Q=q, K=k, V=v, mask=mask)
    qw, kw, vw = wide(q, k, v)
    scores = qw @ kw.swapaxes(-1, -2) / np.sqrt(8)
    close(found["attn"], softmax(np.where(mask, scores, -np.inf)) @ vw)
    close(found["flash"], softmax(scores) @ vw)


@pytest.mark.parametrize("device", DEVICES)
def test_fused(device: str) -> None:
    logits, x, gamma, beta = numbers(6, 50), numbers(5, 96), numbers(96, seed=1), numbers(96, seed=2)
    found = run("tour_fused", device, logits=logits, x=x, gamma=gamma, beta=beta, eps=1e-5)
    z, a, g, b = wide(logits, x, gamma, beta)
    close(found["probs"], softmax(z, None))
    close(found["normalized"], (a - a.mean(1, keepdims=True)) / np.sqrt(a.var(1, keepdims=True) + 1e-5) * g + b)


@pytest.mark.parametrize("device", DEVICES)
def test_devices(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    data, weights = numbers(9, 12), numbers(12, 7)
    found = run("tour_devices", device, data=data, weights=weights)
    for name in ("gpu_result", "cpu_result", "result"):
        close(found[name], data.astype(np.float64) @ weights)
    assert [d["id"] for d in found["devices"]] == [d.id for d in tw.devices()]
    assert found["gpus"] == sum(d.kind == "cuda" for d in tw.devices())
    assert capsys.readouterr().out.startswith("cpu cpu ")


@pytest.mark.parametrize("device", DEVICES)
def test_async(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    data, batches = numbers(33), [numbers(20, seed=n) for n in range(3)]
    given = {f"batch{n + 1}": b for n, b in enumerate(batches)}
    found = run("tour_async", device, data=data, default_value=0.0, **given)
    for name in ("result_now", "result", "in_time"):
        close(found[name], np.exp(data.astype(np.float64)) * 2)
    assert found["cpu_work"] == {"count": 33, "half": 16}
    assert capsys.readouterr().out == "working on 33 elements\n"
    for n, (result, batch) in enumerate(zip(found["results"], batches, strict=True)):
        close(result, batch.astype(np.float64) + n + 1)
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


def block_reference(x: np.ndarray, weights: dict[str, np.ndarray], heads: int) -> np.ndarray:
    x = x.astype(np.float64)
    w = {name: array.astype(np.float64) for name, array in weights.items()}
    batch, seq, hidden = x.shape
    parts = [p.reshape(batch, seq, heads, -1).swapaxes(1, 2) for p in np.split(x @ w["qkv_proj"], 3, -1)]
    q, k, v = parts
    mixed = softmax(q @ k.swapaxes(-1, -2) / np.sqrt(hidden // heads)) @ v

    def norm(rows: np.ndarray, gain: np.ndarray, shift: np.ndarray) -> np.ndarray:
        return (rows - rows.mean(-1, keepdims=True)) / np.sqrt(rows.var(-1, keepdims=True) + 1e-6) * gain + shift

    seen = norm(x + mixed.swapaxes(1, 2).reshape(x.shape) @ w["out_proj"], w["ln1_weight"], w["ln1_bias"])
    return norm(seen + gelu(seen @ w["ffn_up"]) @ w["ffn_down"], w["ln2_weight"], w["ln2_bias"])


def block_weights(hidden: int, inner: int, seed: int) -> dict[str, np.ndarray]:
    shapes = {
        "qkv_proj": (hidden, 3 * hidden), "out_proj": (hidden, hidden), "ln1_weight": (hidden,), "ln1_bias": (hidden,),
        "ffn_up": (hidden, inner), "ffn_down": (inner, hidden), "ln2_weight": (hidden,), "ln2_bias": (hidden,),
    }  # fmt: skip
    return {n: numbers(*s, seed=seed + p) / np.float32(s[0] ** 0.5 if len(s) > 1 else 1) for p, (n, s) in enumerate(shapes.items())}


@pytest.mark.parametrize(("batch", "seq", "heads", "width"), [(2, 24, 4, 8), (1, 67, 2, 16)])
@pytest.mark.parametrize("device", DEVICES)
def test_transformer_block(device: str, batch: int, seq: int, heads: int, width: int) -> None:
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
