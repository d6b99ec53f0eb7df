"""Qwen 2 and Qwen 3: decoders as Llama, with halves of a head turned. Qwen 2 has biases of queries, keys and values, Qwen 3 norms of queries and keys."""

from __future__ import annotations

from tilewright.graphs.tensor import Tensor
from tilewright.models.architectures.llama import angles
from tilewright.models.network import Network


def qwen2(net: Network, ids: Tensor, position: Tensor) -> Tensor:
    return _decoder(net, ids, position, has_norms=False)


def qwen3(net: Network, ids: Tensor, position: Tensor) -> Tensor:
    return _decoder(net, ids, position, has_norms=True)


def _decoder(net: Network, ids: Tensor, position: Tensor, has_norms: bool) -> Tensor:
    s, turns = net.shape, angles(net)
    x = net.embedding(ids)
    for n in range(s.layers):
        layer = f"blk.{n}"
        h = net.rms_norm(x, f"{layer}.attn_norm")
        q = net.split_heads(net.product(h, f"{layer}.attn_q", s.heads * s.depth), s.heads)
        k = net.split_heads(net.product(h, f"{layer}.attn_k", s.groups * s.depth), s.groups)
        v = net.split_heads(net.product(h, f"{layer}.attn_v", s.groups * s.depth), s.groups)
        if has_norms:
            q, k = net.rms_norm(q, f"{layer}.attn_q_norm"), net.rms_norm(k, f"{layer}.attn_k_norm")
        mixed = net.attention(n, net.turned(q, position, turns), net.turned(k, position, turns), v, position)
        x = net.op("Add", x, net.product(mixed, f"{layer}.attn_output", s.width))
        x = net.op("Add", x, net.gated(net.rms_norm(x, f"{layer}.ffn_norm"), layer, {"op": "Silu"}))
    return net.rms_norm(x, "output_norm")
