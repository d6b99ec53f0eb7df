"""Llama 1, 2 and 3, and what is built like them (Mistral, TinyLlama, SmolLM).

Files of GGUF turn neighbouring features against each other, folders the halves of a head: their rows are in another order. `rope_freqs.weight`, where a file has it, divides
the angles of positions; folders of Llama 3 say the same in `rope_scaling`.
"""

from __future__ import annotations

import numpy as np

from tilewright.graphs.tensor import Tensor
from tilewright.models.config import frequencies, scaled
from tilewright.models.network import Network


def angles(net: Network) -> Tensor:
    """What one position turns each pair of features by."""
    s = net.shape
    turns = scaled(frequencies(s.depth, s.theta), net.fields)
    factors = net.host_array("rope_freqs.weight", s.depth // 2)
    return net.constant("turns", (turns if factors is None else turns / factors).astype(np.float32))


def llama(net: Network, ids: Tensor, position: Tensor) -> Tensor:
    s, turns, pairs = net.shape, angles(net), net.fields.kind == "gguf"
    x = net.embedding(ids)
    for n in range(s.layers):
        layer = f"blk.{n}"
        h = net.rms_norm(x, f"{layer}.attn_norm")
        q = net.split_heads(net.product(h, f"{layer}.attn_q", s.heads * s.depth), s.heads)
        k = net.split_heads(net.product(h, f"{layer}.attn_k", s.groups * s.depth), s.groups)
        v = net.split_heads(net.product(h, f"{layer}.attn_v", s.groups * s.depth), s.groups)
        q, k = net.turned(q, position, turns, pairs), net.turned(k, position, turns, pairs)
        mixed = net.attention(n, q, k, v, position, s.window)
        x = net.op("Add", x, net.product(mixed, f"{layer}.attn_output", s.width))
        x = net.op("Add", x, net.gated(net.rms_norm(x, f"{layer}.ffn_norm"), layer, {"op": "Silu"}))
    return net.rms_norm(x, "output_norm")
