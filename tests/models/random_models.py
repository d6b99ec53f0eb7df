"""Small random models of every architecture: files of GGUF, or folders of safetensors, and their weights as float32 for the reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

import tilewright as tw
from models import reference
from tilewright.models.folders import folder_names
from tilewright.models.formats.gguf import write_gguf

Arrays = dict[str, Any]


class RandomModel:
    """Tensors by the names of GGUF, as they are in the file (`tensors`) and as float32 (`weights`)."""

    def __init__(self, architecture: str, seed: int = 0, layers: int = 2, width: int = 64, heads: int = 6, groups: int = 2, depth: int = 10, hidden: int = 96, words: int = 67, formats: tuple[Any, ...] = (), context: int = 64, window: int = 0, by_layer: bool = False) -> None:
        self.architecture, self.words, self.context, self.window = architecture, words, context, window
        self.layers, self.width, self.heads, self.groups, self.depth, self.hidden = layers, width, heads, groups, depth, hidden
        self.rng = np.random.default_rng(seed)
        self.formats: tuple[Any, ...] = formats
        self.by_layer = by_layer
        self.turns: dict[str, int] = {}
        self.tensors: Arrays = {}
        self.weights: dict[str, np.ndarray] = {}
        self.theta = 500.0
        (self._bert if architecture == "bert" else self._decoder)()

    # -- weights ------------------------------------------------------------------------------------------------

    def add(self, name: str, *shape: int, gain: bool = False, packs: bool = True) -> None:
        values = self.rng.standard_normal(shape) / (1 if len(shape) == 1 else shape[-1] ** 0.5)
        array = (1 + 0.2 * values if gain else values * (0.3 if len(shape) == 1 else 1)).astype(np.float32)
        stored: Any = array
        if self.formats and len(shape) == 2 and packs:
            # The same format in every layer: layers are then one program, as in most files; `by_layer`: other ones in every other layer, as in files of mixed formats.
            part = name if self.by_layer else ".".join(name.split(".")[2:]) if name.startswith("blk.") else name
            dtype = self.formats[self.turns.setdefault(part, len(self.turns)) % len(self.formats)]
            if dtype is not None and shape[-1] % dtype.block == 0:
                stored = tw.quantize(array, dtype) if dtype.is_packed else array.astype(dtype.numpy)
                array = tw.dequantize(stored) if dtype.is_packed else stored.astype(np.float32)
        self.tensors[name], self.weights[name] = stored, np.asarray(array)

    def _decoder(self) -> None:
        queries, keys = self.heads * self.depth, self.groups * self.depth
        gemma = self.architecture == "gemma3"
        self.add("token_embd.weight", self.words, self.width)
        self.add("output_norm.weight", self.width, gain=True)
        if not gemma:
            self.add("output.weight", self.words, self.width)
        for n in range(self.layers):
            at = f"blk.{n}"
            for part, rows in (("q", queries), ("k", keys), ("v", keys)):
                self.add(f"{at}.attn_{part}.weight", rows, self.width)
                if self.architecture == "qwen2":
                    self.add(f"{at}.attn_{part}.bias", rows)
            self.add(f"{at}.attn_output.weight", self.width, queries)
            norms = ["attn_norm", "ffn_norm"] + (["post_attention_norm", "post_ffw_norm"] if gemma else [])
            for norm in norms:
                self.add(f"{at}.{norm}.weight", self.width, gain=True)
            if gemma or self.architecture == "qwen3":
                for part in "qk":
                    self.add(f"{at}.attn_{part}_norm.weight", self.depth, gain=True)
            for name, rows, columns in (("gate", self.hidden, self.width), ("up", self.hidden, self.width), ("down", self.width, self.hidden)):
                self.add(f"{at}.ffn_{name}.weight", rows, columns)

    def _bert(self) -> None:
        self.heads = self.groups = self.width // self.depth
        self.add("token_embd.weight", self.words, self.width)
        self.add("position_embd.weight", self.context, self.width, packs=False)
        self.add("token_types.weight", 2, self.width, packs=False)
        for name in ["token_embd_norm", *(f"blk.{n}.{norm}" for n in range(self.layers) for norm in ("attn_output_norm", "layer_output_norm"))]:
            self.add(f"{name}.weight", self.width, gain=True)
            self.add(f"{name}.bias", self.width)
        for n in range(self.layers):
            for name, rows, columns in (("attn_q", self.width, self.width), ("attn_k", self.width, self.width), ("attn_v", self.width, self.width), ("attn_output", self.width, self.width), ("ffn_up", self.hidden, self.width), ("ffn_down", self.width, self.hidden)):
                self.add(f"blk.{n}.{name}.weight", rows, columns)
                self.add(f"blk.{n}.{name}.bias", rows)

    # -- files --------------------------------------------------------------------------------------------------

    def metadata(self) -> dict[str, Any]:
        a = self.architecture
        found: dict[str, Any] = {
            "general.architecture": a, f"{a}.block_count": self.layers, f"{a}.embedding_length": self.width, f"{a}.feed_forward_length": self.hidden, f"{a}.context_length": self.context,
            f"{a}.attention.head_count": self.heads, f"{a}.attention.head_count_kv": self.groups,
        }  # fmt: skip
        if a == "bert":
            return found | {f"{a}.attention.layer_norm_epsilon": 1e-5, f"{a}.pooling_type": 1}
        found |= {f"{a}.attention.key_length": self.depth, f"{a}.attention.value_length": self.depth, f"{a}.attention.layer_norm_rms_epsilon": 1e-6, f"{a}.rope.freq_base": self.theta}
        return found | ({f"{a}.attention.sliding_window": self.window} if self.window else {})

    def tokenizer(self) -> dict[str, Any]:
        """A vocabulary of bytes and some letters, as SentencePiece has it."""
        tokens = ["<unk>", "<s>", "</s>", "\u2581", *"abcdefghijklmnopqrstuvwxyz"]
        tokens += [f"piece{n}" for n in range(self.words - len(tokens))]
        return {
            "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": np.array([-float(n) for n in range(len(tokens))], np.float32),
            "tokenizer.ggml.token_type": np.array([2, 3, 3, *([1] * (len(tokens) - 3))], np.int32), "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.add_bos_token": True,
        }  # fmt: skip

    def gguf(self, path: Path, tokenizer: bool = True) -> Path:
        write_gguf(path, self.metadata() | (self.tokenizer() if tokenizer else {}), self.tensors)
        return path

    def folder(self, path: Path, more: dict[str, Any] | None = None) -> Path:
        """Names and numbers as in folders of the transformers library."""
        from tilewright.models.fields import FOLDER_FIELDS
        from tilewright.models.folders import _DECODER, _TABLES

        path.mkdir(exist_ok=True)
        fields = {f"{self.architecture}.{field}": name for name, field in FOLDER_FIELDS.items()}
        config = {fields[key]: value for key, value in self.metadata().items() if key in fields}
        (path / "config.json").write_text(json.dumps(config | {"model_type": self.architecture} | (more or {})))
        table = {own: name for name, own in _TABLES.get(self.architecture, _DECODER).items()}
        tensors: dict[str, np.ndarray] = {}
        for name, array in self.weights.items():
            stem, _, kind = name.rpartition(".")
            number = stem.split(".")[1] if stem.startswith("blk.") else ""
            own = table[stem.replace(f"blk.{number}.", "blk.{}.") if number else stem].format(number)
            tensors[f"{own}.{kind}"] = array - 1 if self.architecture == "gemma3" and stem.endswith("norm") else array
        assert set(folder_names(self.architecture, tensors)) == set(self.weights)
        write_safetensors(path / "model.safetensors", tensors)
        return path

    # -- the reference ------------------------------------------------------------------------------------------

    def shape(self) -> reference.Shape:
        gemma = self.architecture == "gemma3"
        is_global = [gemma and self.window and n % 6 != 5 for n in range(self.layers)]
        return reference.Shape(
            self.layers, self.heads, self.groups, self.depth, 1e-5 if self.architecture == "bert" else 1e-6, tuple(10000.0 if local else self.theta for local in is_global),
            tuple(self.window if local else 0 for local in is_global), pairs=self.architecture == "llama", embedding_scale=self.width**0.5 if gemma else 1.0, gelu=gemma, has=frozenset(self.weights),
        )  # fmt: skip

    def logits(self, ids: list[int], **changes: Any) -> np.ndarray:
        from dataclasses import replace

        return reference.decoder(self.weights.__getitem__, replace(self.shape(), **changes), ids, dtype=np.float64)


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    header: dict[str, Any] = {}
    at = 0
    for name, array in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(np.ascontiguousarray(a, np.float32).tobytes() for a in tensors.values()))
