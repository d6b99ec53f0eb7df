"""Names of tensors in folders of safetensors, and which weight of ours each of them is.

In: a `ModelFile` of a folder and the name of its architecture. Out: for each name of GGUF the tensor that is meant, and what is done to it first: Gemma keeps the gain of norms less 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np

Change = Callable[[np.ndarray], np.ndarray]
Names = Mapping[str, tuple[str, Change | None]]

_DECODER = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "model.layers.{}.input_layernorm": "blk.{}.attn_norm", "model.layers.{}.self_attn.q_proj": "blk.{}.attn_q", "model.layers.{}.self_attn.k_proj": "blk.{}.attn_k",
    "model.layers.{}.self_attn.v_proj": "blk.{}.attn_v", "model.layers.{}.self_attn.o_proj": "blk.{}.attn_output", "model.layers.{}.self_attn.q_norm": "blk.{}.attn_q_norm",
    "model.layers.{}.self_attn.k_norm": "blk.{}.attn_k_norm", "model.layers.{}.mlp.gate_proj": "blk.{}.ffn_gate", "model.layers.{}.mlp.up_proj": "blk.{}.ffn_up",
    "model.layers.{}.mlp.down_proj": "blk.{}.ffn_down", "model.layers.{}.post_attention_layernorm": "blk.{}.ffn_norm",
}  # fmt: skip
_GEMMA = _DECODER | {
    "model.layers.{}.post_attention_layernorm": "blk.{}.post_attention_norm", "model.layers.{}.pre_feedforward_layernorm": "blk.{}.ffn_norm",
    "model.layers.{}.post_feedforward_layernorm": "blk.{}.post_ffw_norm",
}  # fmt: skip
_BERT = {
    "embeddings.word_embeddings": "token_embd", "embeddings.position_embeddings": "position_embd", "embeddings.token_type_embeddings": "token_types", "embeddings.LayerNorm": "token_embd_norm",
    "encoder.layer.{}.attention.self.query": "blk.{}.attn_q", "encoder.layer.{}.attention.self.key": "blk.{}.attn_k", "encoder.layer.{}.attention.self.value": "blk.{}.attn_v",
    "encoder.layer.{}.attention.output.dense": "blk.{}.attn_output", "encoder.layer.{}.attention.output.LayerNorm": "blk.{}.attn_output_norm",
    "encoder.layer.{}.intermediate.dense": "blk.{}.ffn_up", "encoder.layer.{}.output.dense": "blk.{}.ffn_down", "encoder.layer.{}.output.LayerNorm": "blk.{}.layer_output_norm",
}  # fmt: skip
_TABLES = {"gemma3": _GEMMA, "bert": _BERT}


def more_one(array: np.ndarray) -> np.ndarray:
    """A gain that is kept less 1."""
    return array.astype(np.float32) + np.float32(1)


def folder_names(architecture: str, tensors: Iterable[str]) -> Names:
    """The tensors of a folder by names of GGUF. A common beginning (`bert.`, `model.language_`) does not count."""
    table = _TABLES.get(architecture, _DECODER)
    found: dict[str, tuple[str, Change | None]] = {}
    for name in tensors:
        stem, _, kind = name.rpartition(".")
        parts = stem.split(".")
        numbers = [part for part in parts if part.isdigit()]
        form = ".".join("{}" if part.isdigit() else part for part in parts)
        own = next((table[form[start:]] for start in _starts(form) if form[start:] in table), None)
        if own is None or kind not in ("weight", "bias"):
            continue
        change = more_one if architecture == "gemma3" and own.endswith("norm") else None
        found[f"{own.format(*numbers)}.{kind}"] = name, change
    return found


def _starts(form: str) -> list[int]:
    """Where a name may begin: at its first letter, or behind any point."""
    return [0, *(place + 1 for place, letter in enumerate(form) if letter == ".")]
