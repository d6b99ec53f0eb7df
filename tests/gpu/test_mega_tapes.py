"""Tapes and models as one persistent kernel on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewright as tw
from models.random_models import RandomModel
from tilewright.execute.devices import find_device
from tilewright.mega.persistent.entry import PersistentStep
from unit.mega.test_mega_few_rows import network
from unit.mega.test_tape_ops import CASES, close, tape_of, wide

pytestmark = pytest.mark.requires("cuda")


@pytest.mark.parametrize("name", CASES)
def test_op(name: str) -> None:
    op, arrays, attributes, compute, frozen = CASES[name]
    with tw.mega.plan(tape_of(op, arrays, attributes, frozen)).compile("cuda").load() as runner:
        given = {f"x{n}": a for n, a in enumerate(arrays) if n not in frozen}
        runner.launch(given)
        found = runner.launch(given)
    with np.errstate(all="ignore"):
        close(found, wide(np.asarray(compute(*map(wide, arrays)))), found.dtype)


@pytest.mark.parametrize("ring_bytes", [12 << 10, 96 << 10])
@pytest.mark.parametrize("dtype", [tw.f32, tw.bf16, tw.q8_0, tw.q4_k])
def test_weights_by_a_ring(dtype: Any, ring_bytes: int) -> None:
    """Chains of products give the bits that they give without a ring, launch after launch."""
    rng = np.random.default_rng(3)
    tape = tw.mega.Tape("ring")
    wide = 1536
    h = tape.input("x", (1, wide))
    for n in range(3):
        rows = (rng.standard_normal((wide, wide)) / wide**0.5).astype(np.float32)
        weight = tape.frozen(f"w{n}", tw.quantize(rows, dtype) if dtype.is_packed else rows.astype(dtype.numpy))
        h = tape.emit("Tanh", tape.emit("MatMul", h, weight, transB=1))
    tape.output("y", h)
    plan = tw.mega.plan(tape)
    x = rng.standard_normal((1, wide)).astype(np.float32)
    with plan.compile("cuda", ring_bytes=0).load() as without, plan.compile("cuda", ring_bytes=ring_bytes).load() as runner:
        wanted = without.launch(x)
        for _ in range(200):
            assert np.array_equal(runner.launch(x), wanted)


@pytest.mark.parametrize(("dtype", "rows"), [(tw.bf16, 8), (tw.f16, 5)])
def test_several_rows_by_matrix_instructions(dtype: Any, rows: int) -> None:
    g, x, wanted = network(dtype, rows, 1536, 1000)
    place = find_device("cuda")
    step = PersistentStep(g.executor, g.plan(x=x.shape), place, {"x": tw.to_device(x, "cuda")})
    assert all(op.kernel.attrs.get("row_matrix") for op in step.step.ops)
    for _ in range(20):
        step.launch()
    assert np.abs(np.asarray(step.outputs["y"].numpy(), np.float64) - wanted).max() < 0.06
    step.close()


def test_device_arrays_stay_on_the_device() -> None:
    tape = tw.mega.Tape("stays")
    tape.kv_cache(1, 8, 1, 16)
    rows = tape.input("rows", (1, 1, 16))
    tape.emit("KVCacheAppendK", rows)
    tape.output("y", tape.emit("Neg", rows))
    keys, values = ([tw.to_device(np.zeros((8, 1, 16), np.float32), "cuda")] for _ in range(2))
    given = np.arange(16, dtype=np.float32).reshape(1, 1, 16)
    with tw.mega.plan(tape).compile("cuda").load() as runner:
        runner.set_kv_cache(keys, values)
        found = runner.launch(tw.to_device(given, "cuda"), 3)
        assert not isinstance(found, np.ndarray) and np.array_equal(found.numpy(), -given)
        with pytest.raises(tw.UserError, match="an array of the host"):
            runner.set_kv_cache([np.zeros((8, 1, 16), np.float32)], values)
    assert np.array_equal(keys[0].numpy()[3], given[0]) and not keys[0].numpy()[:3].any()


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_models(architecture: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"layers": 6, "window": 4} if architecture == "gemma3" else {}
    random = RandomModel(architecture, **options)
    model = tw.models.load(random.gguf(tmp_path / "m.gguf"), device="cuda", context=64, cache=tw.f32)
    ids = [1, 5, 33, 2, 66, 7, 12]
    for sampling in ({}, {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "seed": 4}):
        graph = list(model.generate_ids(ids, tokens=40, **sampling))
        assert list(model.generate_ids(ids, tokens=40, engine="mega", **sampling)) == graph
        assert model.stats.engine == "mega"
        assert list(model.generate_ids(ids, tokens=40, engine="auto", **sampling)) == graph
        assert set(model.stats.measured) == {"graph", "mega"}


@pytest.mark.parametrize("options", [{}, {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "seed": 4}])
def test_a_batch_of_texts(tmp_path: Path, options: dict[str, Any]) -> None:
    """Sequences of several lengths in one step: the tokens that captured graphs choose."""
    random = RandomModel("gemma3", layers=6, width=64, heads=4, groups=2, depth=64, hidden=128, window=4, formats=(tw.q8_0, tw.q5_0), by_layer=True)
    model = tw.models.load(random.gguf(tmp_path / "m.gguf", tokenizer=False), device="cuda", context=60)
    prompts = [[5], [1, 5, 33, 2], [7], [8, 9]]
    wanted = model.generate_batch_ids(prompts, tokens=[20, 7, 33, 1], engine="graph", **options)
    assert [len(ids) for ids in wanted] == [20, 7, 33, 1]
    assert model.generate_batch_ids(prompts, tokens=[20, 7, 33, 1], engine="mega", **options) == wanted


def test_blocks_that_sleep() -> None:
    """Blocks that come late, launch after launch: the same bits."""
    from bench.mega import small_step

    from tilewright.execute.devices import find_device

    place = find_device("cuda")
    plain, late = small_step(place, 0), small_step(place, 3000)
    plain.launch()
    wanted = plain.outputs["y"].numpy()
    for _ in range(300):
        late.launch()
        assert np.array_equal(late.outputs["y"].numpy(), wanted)
    plain.close()
    late.close()
