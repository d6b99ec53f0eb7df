"""Model files of random weights with the shapes and formats of real ones, for measurements: Gemma 3 270M (Q4_K_M), and an encoder of 6 layers.

In: a path. Out: a file there, written once. Numbers are random bytes with small scales, so that writing takes seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import tilewright as tw
from tilewright.models.formats.gguf import write_gguf

MORE_BITS = (0, 1, 4, 7, 10, 13, 15, 16, 17)
"""Layers of Gemma's file whose values and down products have more bits."""


def packed(rng: np.random.Generator, dtype: tw.DType, rows: int, columns: int) -> tw.PackedArray:
    """Random numbers with random scales, made of few rows that repeat."""
    few = rng.standard_normal((min(rows, 64), columns)).astype(np.float32) * columns**-0.5
    blocks = tw.quantize(few, dtype).blocks
    return tw.PackedArray(np.ascontiguousarray(np.resize(blocks, (rows, *blocks.shape[1:]))), dtype)


def gemma_file(path: Path) -> Path:
    """Of the shapes and formats of Gemma 3 270M, Q4_K_M: 253 MB."""
    if path.exists():
        return path
    rng = np.random.default_rng(1)
    tensors: dict[str, Any] = {"token_embd.weight": packed(rng, tw.q8_0, 262144, 640), "output_norm.weight": _gain(rng, 640)}
    for n in range(18):
        more, at = n in MORE_BITS, f"blk.{n}"
        for name, dtype, rows, columns in (
            ("attn_q", tw.q5_0, 1024, 640), ("attn_k", tw.q5_0, 256, 640), ("attn_v", tw.q8_0 if more else tw.q5_0, 256, 640), ("attn_output", tw.q4_k, 640, 1024),
            ("ffn_gate", tw.q5_0, 2048, 640), ("ffn_up", tw.q5_0, 2048, 640), ("ffn_down", tw.q6_k if more else tw.q4_k, 640, 2048),
        ):  # fmt: skip
            tensors[f"{at}.{name}.weight"] = packed(rng, dtype, rows, columns)
        for name, features in (("attn_norm", 640), ("ffn_norm", 640), ("post_attention_norm", 640), ("post_ffw_norm", 640), ("attn_q_norm", 256), ("attn_k_norm", 256)):
            tensors[f"{at}.{name}.weight"] = _gain(rng, features)
    g = "gemma3"
    metadata: dict[str, Any] = {
        "general.architecture": g, f"{g}.context_length": 32768, f"{g}.embedding_length": 640, f"{g}.block_count": 18, f"{g}.feed_forward_length": 2048, f"{g}.attention.head_count": 4,
        f"{g}.attention.layer_norm_rms_epsilon": 1e-6, f"{g}.attention.key_length": 256, f"{g}.attention.value_length": 256, f"{g}.rope.freq_base": 1e6, f"{g}.attention.sliding_window": 512,
        f"{g}.attention.head_count_kv": 1,
    }  # fmt: skip
    write_gguf(path, metadata | _vocabulary(262144), tensors)
    return path


def _vocabulary(words: int) -> dict[str, Any]:
    """Of SentencePiece: control tokens, bytes, and pieces that are numbers."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{n:02X}>" for n in range(256))]
    kinds = [3, 3, 3, 2] + [6] * 256
    tokens += [f"\u2581{n}" for n in range(words - len(tokens))]
    kinds += [1] * (words - len(kinds))
    t = "tokenizer.ggml"
    return {
        f"{t}.model": "llama", f"{t}.tokens": tokens, f"{t}.scores": -np.arange(words, dtype=np.float32), f"{t}.token_type": np.array(kinds, np.int32),
        f"{t}.bos_token_id": 2, f"{t}.eos_token_id": 1, f"{t}.unknown_token_id": 3, f"{t}.padding_token_id": 0, f"{t}.add_bos_token": True,
    }  # fmt: skip


def encoder_file(path: Path, layers: int = 6, width: int = 384, hidden: int = 1536, words: int = 30522) -> Path:
    """A BERT of 6 layers, 384 wide, 12 heads, f32."""
    if path.exists():
        return path
    rng = np.random.default_rng(2)

    def weight(rows: int, columns: int) -> np.ndarray:
        values: np.ndarray = rng.standard_normal((rows, columns)) * columns**-0.5
        return values.astype(np.float32)

    tensors: dict[str, Any] = {"token_embd.weight": weight(words, width), "position_embd.weight": weight(512, width), "token_types.weight": weight(2, width)}
    for name in ["token_embd_norm", *(f"blk.{n}.{norm}" for n in range(layers) for norm in ("attn_output_norm", "layer_output_norm"))]:
        tensors[f"{name}.weight"], tensors[f"{name}.bias"] = _gain(rng, width), np.zeros(width, np.float32)
    for n in range(layers):
        for name, rows, columns in (*((f"attn_{p}", width, width) for p in "qkv"), ("attn_output", width, width), ("ffn_up", hidden, width), ("ffn_down", width, hidden)):
            tensors[f"blk.{n}.{name}.weight"], tensors[f"blk.{n}.{name}.bias"] = weight(rows, columns), np.zeros(rows, np.float32)
    b = "bert"
    metadata = {
        "general.architecture": b, f"{b}.context_length": 512, f"{b}.embedding_length": width, f"{b}.block_count": layers, f"{b}.feed_forward_length": hidden, f"{b}.attention.head_count": 12,
        f"{b}.attention.layer_norm_epsilon": 1e-12, f"{b}.pooling_type": 1,
    }  # fmt: skip
    write_gguf(path, metadata, tensors)
    return path


def _gain(rng: np.random.Generator, features: int) -> np.ndarray:
    return (1 + 0.1 * rng.standard_normal(features)).astype(np.float32)
