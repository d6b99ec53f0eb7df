"""What is wrong with a file or a call is said before anything runs, with the name of the tensor or field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from models.random_models import RandomModel

import tilewright as tw
from tilewright.cli.main import cli
from tilewright.models.formats.gguf import write_gguf


def load(random: RandomModel, tmp_path: Path, metadata: dict[str, Any] | None = None, **options: Any) -> Any:
    write_gguf(tmp_path / "m.gguf", random.metadata() | random.tokenizer() | (metadata or {}), random.tensors)
    return tw.models.load(tmp_path / "m.gguf", device="cpu", **options)


def message(call: Any) -> str:
    with pytest.raises(tw.UserError) as caught:
        call()
    return str(caught.value)


def test_an_unknown_architecture_lists_the_known_ones(tmp_path: Path) -> None:
    random = RandomModel("llama", layers=1)
    said = message(lambda: load(random, tmp_path, {"general.architecture": "mamba"}))
    assert "'mamba'" in said
    for name in ("bert", "gemma3", "llama", "qwen2", "qwen3"):
        assert name in said
        assert name in tw.models.architectures()


def test_missing_tensors_and_wrong_shapes_are_named(tmp_path: Path) -> None:
    random = RandomModel("qwen3", layers=1)
    kept = random.tensors.pop("blk.0.attn_k_norm.weight")
    assert "'blk.0.attn_k_norm.weight' is missing" in message(lambda: load(random, tmp_path))
    random.tensors["blk.0.attn_k_norm.weight"] = np.ones(4, np.float32)
    assert "'blk.0.attn_k_norm.weight' has the shape [4], not [10]" in message(lambda: load(random, tmp_path))
    random.tensors["blk.0.attn_k_norm.weight"] = kept
    assert "'qwen3.embedding_length' is missing" in message(lambda: load(random, tmp_path, {"qwen3.embedding_length": "wide"})).replace("'wide'", "missing")
    assert "cannot share" in message(lambda: load(random, tmp_path, {"qwen3.attention.head_count_kv": 4}))
    assert "'qwen3.block_count' is 100000" in message(lambda: load(random, tmp_path, {"qwen3.block_count": 100000}))


def test_calls_that_cannot_be_are_refused(tmp_path: Path) -> None:
    model = load(RandomModel("llama", layers=1), tmp_path, context=12)
    assert "the prompt has 13 tokens, and the context 12" in message(lambda: model.generate_ids([3] * 13))
    assert "token 1 is 67, and the model has ids up to 66" in message(lambda: model.logits([3, 67]))
    assert "token 0 is -1" in message(lambda: model.generate_ids([-1]))
    assert "the prompt is empty" in message(lambda: model.generate_ids([]))
    assert "top_p is 1.5" in message(lambda: model.generate("a", temperature=1.0, top_p=1.5))
    assert "do nothing without a temperature" in message(lambda: model.generate("a", top_k=3))
    assert "embeds none" in message(lambda: model.embed(["a"]))
    assert "context is 65, and the model knows 64 positions" in message(lambda: load(RandomModel("llama", layers=1), tmp_path, context=65))
    assert "activations='int4'" in message(lambda: load(RandomModel("llama", layers=1), tmp_path, activations="int4"))


def test_the_command_line_writes_text_and_vectors(tmp_path: Path) -> None:
    random = RandomModel("llama", layers=1)
    write_gguf(tmp_path / "m.gguf", random.metadata() | random.tokenizer(), random.tensors)
    done = CliRunner().invoke(cli, ["generate", str(tmp_path / "m.gguf"), "abc", "--tokens", "6", "--device", "cpu", "--stats", "--context", "24"])
    assert done.exit_code == 0, done.output
    assert "text: " in done.output
    assert "exact (f32)" in done.output or "eight bits" in done.output
    assert "no control tokens" in CliRunner().invoke(cli, ["chat", str(tmp_path / "m.gguf"), "--device", "cpu"]).output
    assert "embeds nothing" in CliRunner().invoke(cli, ["embed", str(tmp_path / "m.gguf"), "a", "--device", "cpu"]).output
