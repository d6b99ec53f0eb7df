"""BERT: an encoder of sentences. Every token sees all others; norms come after each part; positions are rows of a weight."""

from __future__ import annotations

from tilewright.graphs.tensor import Tensor
from tilewright.models.network import Network


def bert(net: Network, ids: Tensor, places: Tensor, lengths: Tensor) -> Tensor:
    """`ids` are [sentence, token]; `places` are the positions of tokens, `lengths` how many tokens of each sentence count."""
    s = net.shape
    x = net.op("Add", net.embedding(ids), net.embedding(places, "position_embd"))
    if net.has("token_types.weight"):
        types = net.weight("token_types.weight", None, s.width)
        x = net.op("Add", x, net.op("Embedding", net.zeros("first_type"), types, dtype=x.dtype).reshape(s.width))
    sentences, tokens, _ = x.sizes
    # Tokens of all sentences are rows of one matrix, so that sums and what follows them are one launch.
    x = net.layer_norm(x, "token_embd_norm").reshape((sentences * tokens, s.width))
    for n in range(s.layers):
        layer = f"blk.{n}"
        q, k, v = (net.product(x, f"{layer}.attn_{part}", s.width).reshape((sentences, tokens, s.heads, s.depth)) for part in "qkv")
        q, k, v = (net.cast(part, net.cache_dtype) for part in (q, k, v))
        mixed = net.cast(net.op("Attention", q, k, v, lengths=lengths, scale=s.scale), x.dtype)
        mixed = net.product(mixed.reshape((sentences * tokens, s.width)), f"{layer}.attn_output", s.width)
        x = net.layer_norm(net.op("Add", x, mixed), f"{layer}.attn_output_norm")
        h = net.op("Gelu", net.product(x, f"{layer}.ffn_up", s.hidden))
        x = net.layer_norm(net.op("Add", x, net.product(h, f"{layer}.ffn_down", s.width)), f"{layer}.layer_output_norm")
    return x.reshape((sentences, tokens, s.width))
