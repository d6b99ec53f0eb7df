"""Ops of transformers with caches: Rope, KVAppend, Attention.

Tensors are (tokens, heads, features), or (sequences, tokens, heads, features). Positions are an array of one element, or of one for each sequence.
"""

from __future__ import annotations

import functools

import numpy as np

from tilewright.base.dtypes import DType
from tilewright.graphs.kernels import attention
from tilewright.graphs.registry import Lowered, NodeCall, OpParam, OpRecord, TensorType, add_op
from tilewright.graphs.tensor import Tensor


def _sequences(x: Tensor) -> Tensor:
    """With an axis of sequences."""
    return x if x.ndim == 4 else x.reshape((1, *x.sizes))


def _block_rows(cache: Tensor, paged: bool) -> Tensor:
    """The bytes of packed blocks, with an axis of sequences where they are not in pages."""
    found = cache.blocks()
    return found if paged or cache.ndim == 4 else found.reshape((1, *found.sizes))


def _check_positions(call: NodeCall, x: Tensor) -> None:
    positions = call.rank("positions", 1)
    if not positions.dtype.is_int:
        raise call.fail(f"'positions' is {positions.form}, not an array of integers", "TW009")
    call.same(positions.sizes[0], x.sizes[0] if x.ndim == 4 else 1, "positions, and the sequences of the rows")


@functools.cache
def _frequencies(depth: int, theta: float) -> np.ndarray:
    """The angle that one position turns each pair of features."""
    return (theta ** (-np.arange(0, depth, 2, dtype=np.float64) / depth)).astype(np.float32)


def _rope_rule(call: NodeCall) -> TensorType:
    x = call.rank("x", 3, 4)
    depth = x.sizes[-1].constant
    if depth is None or depth % 2:
        raise call.fail(f"'x' is {x.form}: its last axis must have an even number of features")
    _check_positions(call, x)
    if "frequencies" in call:
        call.same(call.rank("frequencies", 1).sizes[0], depth // 2, "'frequencies', and half the features")
    return TensorType(x.sizes, x.dtype)


def _rope(call: NodeCall) -> Lowered:
    x = call["x"]
    found = call["frequencies"] if "frequencies" in call else _frequencies(x.sizes[-1].constant, call["theta"])
    return Lowered(attention.rope_pairs if call["pairs"] else attention.rope, {"x": _sequences(x), "frequencies": found}, (TensorType(_sequences(x).sizes, x.dtype),))


def _append_rule(call: NodeCall) -> TensorType:
    cache, rows = call.rank("cache", 3, 4), call.rank("rows", 3, 4)
    if not cache.dtype.is_packed:
        call.same_dtype(cache, rows)
    elif not rows.dtype.is_float:
        raise call.fail(f"the rows are {rows.form}, and the cache is {cache.form}", "TW006", "rows of floats are rounded to the blocks of the cache")
    if cache.ndim != rows.ndim and "table" not in call:
        raise call.fail(f"the cache is {cache.form}, and the rows are {rows.form}", "TW003", "both need an axis of sequences, or none")
    if "table" in call:
        call.rank("cache", 4)
    call.same(cache.sizes[-2], rows.sizes[-2], "heads of the cache and of the rows")
    call.same(cache.sizes[-1], rows.sizes[-1], "features of the cache and of the rows")
    if cache.ndim == 4 and "table" not in call:
        call.same(cache.sizes[0], rows.sizes[0], "sequences of the cache and of the rows")
    _check_positions(call, rows)
    _check_table(call, rows)
    return TensorType(cache.sizes, cache.dtype)


def _check_table(call: NodeCall, rows: Tensor) -> None:
    if "table" in call:
        table = call.rank("table", 2)
        if not table.dtype.is_int:
            raise call.fail(f"'table' is {table.form}, not an array of integers", "TW009")
        call.same(table.sizes[0], rows.sizes[0] if rows.ndim == 4 else 1, "rows of the page table, and sequences")


def _append(call: NodeCall) -> Lowered:
    rows = _sequences(call["rows"])
    if call["cache"].dtype.is_packed:
        given = {"cache": _block_rows(call["cache"], "table" in call), "rows": rows}
        return Lowered(attention.append_q8_paged if "table" in call else attention.append_q8, given, ())
    if "table" in call:
        return Lowered(attention.append_paged, {"rows": rows}, ())
    return Lowered(attention.append, {"rows": rows, "cache": _sequences(call["cache"])}, ())


def _attention_rule(call: NodeCall) -> TensorType:
    q, k, v = call.rank("q", 3, 4), call.rank("k", 3, 4), call.rank("v", 3, 4)
    call.same_dtype(k, v)
    for axis in range(k.ndim):
        if k.ndim == v.ndim:
            call.same(k.sizes[axis], v.sizes[axis], f"axis {axis} of keys and values")
    call.same(q.sizes[-1], k.sizes[-1], "features of queries and keys")
    heads, groups = q.sizes[-2].constant, k.sizes[-2].constant
    if heads is None or groups is None or not groups or heads % groups:
        raise call.fail(f"{q.form} are queries for keys of {k.form}", help="the number of query heads must be a multiple of that of key heads")
    if k.dtype.is_packed and "positions" not in call:
        raise call.fail(f"keys are {k.form}, without positions", "TW008", "give positions=: packed keys are those of a cache")
    if k.dtype.is_packed and call["window"]:
        raise call.fail(f"a window over keys that are {k.form}", "TW016", "use a cache of f16, bf16 or f32")
    if "table" in call and "positions" not in call:
        raise call.fail("a page table without positions", "TW008", "give positions=, the position of each sequence's first token")
    if "positions" in call:
        _check_positions(call, q)
        if call["causal"] is False:
            raise call.fail("causal=False with positions", "TW016", "queries see the cache up to their own position")
    _check_span(call, q)
    _check_table(call, q)
    if "table" not in call:
        if q.ndim != k.ndim:
            raise call.fail(f"queries are {q.form}, and keys {k.form}", "TW003", "both need an axis of sequences, or none")
        if q.ndim == 4:
            call.same(q.sizes[0], k.sizes[0], "sequences of queries and keys")
    if call["causal"] and "positions" not in call:
        call.same(q.sizes[-3], k.sizes[-3], "queries and keys, of which each query sees those up to its own place")
    if call["dtype"] is not None and not call["dtype"].is_float:
        raise call.fail(f"'dtype' is {call['dtype']}, not a dtype of floats", "TW009")
    if call["dtype"] is not None and ("positions" not in call or "table" in call or not call["window"]):
        raise call.fail("dtype= without a window", "TW016", "cast the result with a Copy node; with a window the kernel writes it so")
    return TensorType(q.sizes, call["dtype"] or q.dtype)


def _check_span(call: NodeCall, q: Tensor) -> None:
    """What limits the keys that queries see: a window behind their positions, or lengths of sequences."""
    if call["window"] < 0:
        raise call.fail(f"'window' is {call['window']}", "TW009", "give the number of positions that a query sees, its own included; 0 for all")
    if call["window"] and ("positions" not in call or "table" in call):
        raise call.fail("a window without positions, or with pages", "TW016", "a window needs positions=, and a cache that is one array")
    if "lengths" in call:
        lengths = call.rank("lengths", 1)
        if not lengths.dtype.is_int:
            raise call.fail(f"'lengths' is {lengths.form}, not an array of integers", "TW009")
        if "positions" in call or call["causal"]:
            raise call.fail("lengths with positions, or with causal=True", "TW016", "lengths are for queries that see all keys of their sequence")
        call.same(lengths.sizes[0], q.sizes[0] if q.ndim == 4 else 1, "lengths, and the sequences of the queries")


def _attention(call: NodeCall) -> Lowered:
    q, k = _sequences(call["q"]), call["k"]
    groups = k.sizes[-2].constant
    assert groups is not None
    *front, heads, depth = q.sizes
    scale = call["scale"] if call["scale"] is not None else float(depth.constant or 1) ** -0.5
    grouped = q.reshape((*front, groups, heads.constant // groups, depth))
    given, made = {"q": grouped, "scale": scale}, (TensorType(grouped.sizes, q.dtype),)
    if k.dtype.is_packed:
        given |= {"k": _block_rows(k, "table" in call), "v": _block_rows(call["v"], "table" in call)}
        return Lowered(attention.attention_q8_paged if "table" in call else attention.attention_q8, given, made)
    if "table" in call:
        return Lowered(attention.attention_paged, given, made)
    given |= {"k": _sequences(k), "v": _sequences(call["v"])}
    if "lengths" in call:
        return Lowered(attention.attention_lengths, given, made)
    if "positions" in call:
        if call["window"]:
            dtype = call["dtype"] or q.dtype
            return Lowered(attention.attention_window(dtype), given, (TensorType(grouped.sizes, dtype),))
        return Lowered(attention.attention_cached, given, made)
    return Lowered(attention.attention_causal if call["causal"] else attention.attention, given, made)


add_op(
    OpRecord(
        "Rope", ("x", "positions", "frequencies?"), _rope_rule, _rope,
        (OpParam("theta", float, 10000.0, "scalar", "the base of the angles"), OpParam("pairs", bool, False, doc="neighbouring features are turned against each other, instead of halves")),
        doc="rotary positions: token t of a sequence is turned by positions[s] + t",
    )
)  # fmt: skip
add_op(
    OpRecord(
        "KVAppend", ("cache", "rows", "positions", "table?"), _append_rule, _append, writes=("cache",), aliases=True,
        doc="rows of new tokens are written to a cache, in place, at their positions (or in the pages of the table); gives the cache after that",
    )
)  # fmt: skip
add_op(
    OpRecord(
        "Attention", ("q", "k", "v", "positions?", "table?", "lengths?"), _attention_rule, _attention,
        (OpParam("scale", (float, type(None)), None, "scalar", "what scores are multiplied by; 1/√features"), OpParam("causal", (bool, type(None)), None, doc="a query sees the keys up to its own place"),
         OpParam("window", int, 0, doc="how many positions of a cache a query sees, up to its own; 0: all"),
         OpParam("dtype", (DType, type(None)), None, doc="of the result, with a window; that of the queries")),
        doc="softmax(q · k) · v. With positions, a query sees a cache up to its own position; fewer key heads serve groups of query heads",
    )
)  # fmt: skip
