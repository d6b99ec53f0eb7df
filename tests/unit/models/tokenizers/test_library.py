"""Tokenizers of `tokenizer.json`, with the library that runs them and without."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewright as tw
from tilewright.models import tokenizers
from tilewright.models.formats.gguf import open_gguf, write_gguf

TOKENS = {"<unk>": 0, "<s>": 1, "</s>": 2, "<|im_end|>": 3, "▁": 4, "a": 5, "b": 6, "▁a": 7, "ab": 8, **{f"<0x{byte:02X}>": 9 + byte for byte in range(256)}}
MODEL: dict[str, Any] = {
    "version": "1.0", "truncation": None, "padding": None, "normalizer": {"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
    "added_tokens": [{"id": id, "content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True} for name, id in TOKENS.items() if id < 4],
    "pre_tokenizer": None, "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}], "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
    "decoder": {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
    "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True,
        "ignore_merges": False, "vocab": TOKENS, "merges": [["▁", "a"], ["a", "b"]]},
}  # fmt: skip


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(tw.UserError, match=r"(?s)package tokenizers.*not installed.*pip install \"tilewright\[models\]\""):
        tokenizers.from_file(tmp_path / "tokenizer.json")


def test_with_the_library(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
    (tmp_path / "tokenizer.json").write_text(json.dumps(MODEL))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "{{ x }}"}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5, 99999]}))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        found = tokenizers.from_file(path)
        assert (found.bos, found.eos, found.eot, found.vocabulary_size, found.chat_template) == (1, 2, {2, 3, 5}, 265, "{{ x }}")
    assert found.encode("a b") == [1, 7, 4, 6] and found.encode("a b", add_bos=False) == [7, 4, 6] and found.encode("a", add_bos=True) == [1, 7]
    assert found.encode("a</s>", special=True) == [1, 7, 2]
    assert 2 not in found.encode("a</s>")
    assert found.decode([1, 7, 4, 6, 2]) == "a b" and found.decode([7, 2], special=True) == "a</s>"
    ids = found.encode("a é😀b", add_bos=False)
    assert found.decode(ids) == "a é😀b" and "".join(found.pieces(ids)) == " a é😀b"
    assert list(found.pieces([9 + byte for byte in "é".encode()])) == ["", "é"]
    assert list(found.pieces([9 + 0xC3])) == ["", "\ufffd"]
    assert found.token(7) == "▁a" and found.id_of("▁a") == 7 and found.id_of("none") is None and found.piece(5) == b"a"
    for call in (lambda: found.decode([265]), lambda: found.encode("\ud800")):
        with pytest.raises(tw.UserError):
            call()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]}))
    assert tokenizers.from_file(tmp_path).chat_template == "d"
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "chat_template.jinja").write_text("from a file")
    found = tokenizers.from_file(tmp_path)
    assert found.chat_template == "from a file" and found.bos is None and found.eos == 2
    for text in ("{", "{}", "[]", "\0"):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(tw.UserError, match="is no tokenizer"):
            tokenizers.from_file(tmp_path)
    with pytest.raises(tw.UserError, match="does not exist"):
        tokenizers.from_file(tmp_path / "none.json")


def test_the_tokenizer_of_a_model(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "▁", "a", "▁a"], "tokenizer.ggml.scores": np.float32([0, 0, 0, -2, -3, -1])}, {})
    assert tokenizers.from_model(open_gguf(path)).encode("a a") == [1, 5, 5]
