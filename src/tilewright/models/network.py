"""What descriptions of architectures are written with: layers of a network as nodes of a tensor graph, with weights by name.

In: a graph, weights by the names of GGUF, and the shape of the network. Out: tensors. Every weight is checked for its shape when it is first used, so that
a file that lacks one, or has another shape, is refused before anything runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tilewright.base.dtypes import DType, f32
from tilewright.base.errors import UserError
from tilewright.graphs.graph import TensorGraph
from tilewright.graphs.tensor import Extent, Tensor
from tilewright.models.config import NetworkShape
from tilewright.models.fields import ModelFields

EVERYWHERE = 1 << 30
"""The window of a layer that sees all positions: layers with a window and without are then one program."""
WeightArrays = Callable[[str], Any]
"""The array of a weight by its name; None where the file has none."""


class Network:
    """A graph in the making. `tokens` is how many tokens a run has: a number, or the name of a size."""

    def __init__(self, name: str, fields: ModelFields, shape: NetworkShape, arrays: WeightArrays, tokens: Extent, cache_dtype: DType = f32, activations: str = "", by_rows: bool = False) -> None:
        self.graph = TensorGraph(name)
        self.fields, self.shape, self.tokens, self.cache_dtype, self.activations = fields, shape, tokens, cache_dtype, activations
        self.by_rows = by_rows
        """Whether products of one token walk packed weights row by row, as CPUs want it."""
        self.sequences = 0
        """Where it is not 0, each token is one of its own sequence, with its own position; caches have an axis of sequences."""
        self._arrays = arrays
        self._weights: dict[str, Tensor] = {}

    # -- weights ------------------------------------------------------------------------------------------------

    def has(self, name: str) -> bool:
        return self._arrays(name) is not None

    def weight(self, name: str, *shape: int | None) -> Tensor:
        """The weight of that name, of that shape; None is any extent."""
        found = self._weights.get(name)
        if found is None:
            array = self._arrays(name)
            if array is None:
                raise UserError.at("TW008", f"{self.fields.where}: the tensor '{name}' is missing", help=f"a model of the architecture '{self.fields.name}' has it")
            found = self._weights[name] = self.graph.weight(name, array)
        own = tuple(found.shape)
        if len(own) != len(shape) or any(a is not None and a != b for a, b in zip(shape, own, strict=True)):
            wanted = ", ".join("any" if a is None else str(a) for a in shape)
            raise UserError.at("TW004", f"{self.fields.where}: the tensor '{name}' has the shape {list(own)}, not [{wanted}]", help="the fields of the file say the second")
        return found

    def host_array(self, name: str, *shape: int) -> np.ndarray | None:
        """A small weight as the host has it, for what a description computes itself; None where the file has none."""
        array = self._arrays(name)
        if array is None:
            return None
        found = np.asarray(array.to_host() if hasattr(array, "to_host") else array)
        if found.shape != shape:
            raise UserError.at("TW004", f"{self.fields.where}: the tensor '{name}' has the shape {list(found.shape)}, not {list(shape)}")
        return found

    def rows(self, name: str) -> int:
        """How many rows of the network's width a weight has."""
        found = self.weight(name, None, self.shape.width).shape[0]
        assert isinstance(found, int)
        return found

    def zeros(self, name: str) -> Tensor:
        """One index, 0."""
        return self.constant(name, np.zeros(1, np.int32))

    def constant(self, name: str, array: np.ndarray) -> Tensor:
        """A small array of the architecture's own, such as frequencies."""
        if name not in self._weights:
            self._weights[name] = self.graph.weight(name, array)
        return self._weights[name]

    # -- layers -------------------------------------------------------------------------------------------------

    def op(self, op: str, *inputs: Any, **params: Any) -> Tensor:
        found: Tensor = self.graph.op(op, *inputs, **params)
        return found

    def cast(self, x: Tensor, dtype: DType) -> Tensor:
        return x if x.dtype is dtype else self.op("Copy", x, dtype=dtype)

    def embedding(self, ids: Tensor, name: str = "token_embd", rows: int | None = None, dtype: DType = f32) -> Tensor:
        """A row of the weight for each id."""
        return self.op("Embedding", ids, self.weight(f"{name}.weight", rows, self.shape.width), dtype=dtype)

    def product(self, x: Tensor, name: str, rows: int) -> Tensor:
        """Rows of x times those of the weight, and the bias where the file has one."""
        columns = x.shape[-1]
        weight = self.weight(f"{name}.weight", rows, columns if isinstance(columns, int) else None)
        bias = {"bias": self.weight(f"{name}.bias", rows)} if self.has(f"{name}.bias") else {}
        return self.op("MulMat", x, weight, name=name, **bias, **self.product_options(weight))

    def product_options(self, weight: Tensor) -> dict[str, Any]:
        """What products with a weight are asked for: packed ones may have activations of eight bits."""
        return {"activations": self.activations, "by_rows": self.by_rows} if weight.dtype.is_packed else {}

    def rms_norm(self, x: Tensor, name: str) -> Tensor:
        features = x.shape[-1]
        assert isinstance(features, int)
        return self.op("RmsNorm", x, self.weight(f"{name}.weight", features), epsilon=self.shape.epsilon, name=name)

    def layer_norm(self, x: Tensor, name: str) -> Tensor:
        features = x.shape[-1]
        assert isinstance(features, int)
        return self.op("LayerNorm", x, self.weight(f"{name}.weight", features), self.weight(f"{name}.bias", features), epsilon=self.shape.epsilon, name=name)

    def split_heads(self, x: Tensor, heads: int) -> Tensor:
        """Rows as heads of features."""
        if self.sequences:
            return x.reshape((self.sequences, 1, heads, self.shape.depth))
        return x.reshape((*x.sizes[:-1], heads, self.shape.depth))

    def gated(self, x: Tensor, layer: str, activation: Mapping[str, Any]) -> Tensor:
        """The feed-forward of a decoder: down(act(gate(x)) · up(x))."""
        s = self.shape
        gate = self.op(x=self.product(x, f"{layer}.ffn_gate", s.hidden), **activation)
        return self.product(self.op("Mul", gate, self.product(x, f"{layer}.ffn_up", s.hidden)), f"{layer}.ffn_down", s.width)

    def turned(self, x: Tensor, position: Tensor, turns: Tensor, pairs: bool = False) -> Tensor:
        """Rotary positions."""
        return self.op("Rope", x, position, turns, pairs=pairs)

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, position: Tensor, window: int = 0) -> Tensor:
        """New keys and values go to the caches of the layer; queries see these up to their own position. Gives rows."""
        s = self.shape
        caches = []
        for name, rows in (("keys", k), ("values", v)):
            cache = self.graph.cache(f"{name}.{layer}", (*((self.sequences,) if self.sequences else ()), "longest", s.groups, s.depth), self.cache_dtype)
            caches.append(self.op("KVAppend", cache, self.cast(rows, self.cache_dtype), position))
        asked = self.cast(q, self.cache_dtype)  # both factors of a matrix unit
        mixed = self.op("Attention", asked, *caches, position, scale=s.scale, window=window or EVERYWHERE, dtype=q.dtype)
        if self.sequences:
            return mixed.reshape((self.sequences, s.heads * s.depth))
        return mixed.reshape((*mixed.sizes[:-2], s.heads * s.depth))
