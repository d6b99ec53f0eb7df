"""The shape of a network: how wide, how many layers and heads, and how positions are turned.

In: `ModelFields`. Out: a `NetworkShape`, the same record for all architectures, and the frequencies of rotary positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewright.base.errors import UserError
from tilewright.models.fields import ModelFields


@dataclass(frozen=True)
class NetworkShape:
    """`heads` query heads of `depth` features share `groups` heads of keys and values."""

    layers: int
    width: int
    heads: int
    groups: int
    depth: int
    hidden: int
    context: int
    epsilon: float
    theta: float
    local_theta: float
    window: int
    """How many positions a query of a local layer sees; 0: all."""
    scale: float
    """What scores are multiplied by."""


def read_shape(fields: ModelFields) -> NetworkShape:
    """The shape that a file says; numbers that do not fit together are errors that name the field."""
    width, heads = fields.whole("embedding_length"), fields.whole("attention.head_count", most=1 << 16)
    groups = fields.whole("attention.head_count_kv", heads, most=1 << 16)
    if heads % groups:
        raise UserError.at("TW004", f"{fields.where}: {heads} heads ('{fields.shown('attention.head_count')}') cannot share {groups} heads of keys ('{fields.shown('attention.head_count_kv')}')")
    if fields.get("attention.key_length") is None and width % heads:
        raise UserError.at("TW004", f"{fields.where}: '{fields.shown('embedding_length')}' is {width}, which {heads} heads do not divide", help=f"the file lacks '{fields.shown('attention.key_length')}'")
    depth = fields.whole("attention.key_length", width // heads, most=1 << 16)
    if fields.whole("attention.value_length", depth) != depth:
        raise UserError.at("TW005", f"{fields.where}: keys of {depth} features and values of {fields.whole('attention.value_length')}", help="both have to be equal")
    turned = fields.whole("rope.dimension_count", depth)
    if turned != depth:
        raise UserError.at("TW005", f"{fields.where}: '{fields.shown('rope.dimension_count')}' is {turned}, and heads have {depth} features", help="positions turn whole heads only")
    return NetworkShape(
        fields.whole("block_count", most=1 << 12), width, heads, groups, depth, fields.whole("feed_forward_length"), fields.whole("context_length", 2048),
        fields.real("attention.layer_norm_rms_epsilon", None) or fields.real("attention.layer_norm_epsilon", 1e-5),
        fields.real("rope.freq_base", 10000.0), fields.real("rope.local.freq_base", 10000.0), fields.whole("attention.sliding_window", 0, least=0),
        fields.real("attention.query_scalar", float(depth)) ** -0.5,
    )  # fmt: skip


def frequencies(depth: int, theta: float) -> NDArray[np.float64]:
    """The angle that one position turns each pair of features."""
    found: NDArray[np.float64] = theta ** (-np.arange(0, depth, 2, dtype=np.float64) / depth)
    return found


def scaled(turns: NDArray[np.float64], fields: ModelFields) -> NDArray[np.float64]:
    """Frequencies of a model whose context was stretched: `linear`, or `llama3` (low frequencies are divided, high ones stay)."""
    given: Any = fields.get("rope.scaling.type") if fields.kind == "gguf" else fields.metadata.get("rope_scaling") or fields.metadata.get("rope_parameters")
    if fields.kind == "gguf":
        kind, factor, rest = given or "none", fields.real("rope.scaling.factor", 1.0), {}
    else:
        rest = given if isinstance(given, dict) else {}
        kind, factor = rest.get("rope_type", rest.get("type", "default")), float(rest.get("factor", 1.0))
    if kind in ("none", "default"):
        return turns
    if kind == "linear":
        return turns / factor
    if kind == "llama3":
        low, high, old = (float(rest.get(name, default)) for name, default in (("low_freq_factor", 1.0), ("high_freq_factor", 4.0), ("original_max_position_embeddings", 8192)))
        waves = 2 * math.pi / turns
        smooth = np.clip((old / waves - low) / (high - low), 0, 1)
        return (1 - smooth) * turns / factor + smooth * turns
    raise UserError.at("TW005", f"{fields.where}: positions are scaled by '{kind}'", help="linear and llama3 are known")
