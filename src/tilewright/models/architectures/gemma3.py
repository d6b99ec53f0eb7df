"""Gemma 3: norms before and after each part, norms of queries and keys, layers with a window between layers that see everything.

Every sixth layer sees all positions and turns them with `theta`; the others see a window and turn with `local_theta`. The embedding is multiplied by the root of
the width, and is the output's weight, too. GGUF files and folders differ in the gain of norms: folders keep it less 1 (`folders.py` adds it).
"""

from __future__ import annotations

import math

import numpy as np

from tilewright.graphs.tensor import Tensor
from tilewright.models.config import frequencies, scaled
from tilewright.models.network import Network


def gemma3(net: Network, ids: Tensor, position: Tensor) -> Tensor:
    s = net.shape
    period = net.fields.whole("attention.sliding_window_pattern", 6)
    turns = {
        "local": net.constant("turns.local", frequencies(s.depth, s.local_theta).astype(np.float32)),
        "global": net.constant("turns.global", scaled(frequencies(s.depth, s.theta), net.fields).astype(np.float32)),
    }
    x = net.op("Mul", net.embedding(ids), float(np.float32(math.sqrt(s.width))))
    for n in range(s.layers):
        layer = f"blk.{n}"
        is_global = not s.window or n % period == period - 1
        angles = turns["global" if is_global else "local"]
        h = net.rms_norm(x, f"{layer}.attn_norm")
        q = net.split_heads(net.product(h, f"{layer}.attn_q", s.heads * s.depth), s.heads)
        k = net.split_heads(net.product(h, f"{layer}.attn_k", s.groups * s.depth), s.groups)
        v = net.split_heads(net.product(h, f"{layer}.attn_v", s.groups * s.depth), s.groups)
        q = net.turned(net.rms_norm(q, f"{layer}.attn_q_norm"), position, angles)
        k = net.turned(net.rms_norm(k, f"{layer}.attn_k_norm"), position, angles)
        mixed = net.attention(n, q, k, v, position, 0 if is_global else s.window)
        x = net.op("Add", x, net.rms_norm(net.product(mixed, f"{layer}.attn_output", s.width), f"{layer}.post_attention_norm"))
        h = net.gated(net.rms_norm(x, f"{layer}.ffn_norm"), layer, {"op": "Gelu", "approximate": True})
        x = net.op("Add", x, net.rms_norm(h, f"{layer}.post_ffw_norm"))
    return net.rms_norm(x, "output_norm")
