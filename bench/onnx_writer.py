"""Writes ONNX models for tests and benchmarks: the wire format of protocol buffers, a few lines of it, so that no `onnx` package is needed."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

NUMBERS = {
    np.dtype(kind): number
    for number, kind in {
        1: np.float32, 2: np.uint8, 3: np.int8, 4: np.uint16, 5: np.int16, 6: np.int32, 7: np.int64, 9: np.bool_, 10: np.float16,
        11: np.float64, 12: np.uint32, 13: np.uint64, 16: ml_dtypes.bfloat16, 17: ml_dtypes.float8_e4m3fn, 19: ml_dtypes.float8_e5m2,
    }.items()
}  # fmt: skip


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def integer(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def part(field: int, data: bytes | str) -> bytes:
    data = data.encode() if isinstance(data, str) else data
    return varint(field << 3 | 2) + varint(len(data)) + data


def tensor(array: Any, name: str = "", number: int | None = None) -> bytes:
    """A `TensorProto` with raw data."""
    array = np.asarray(array)
    dims = b"".join(integer(1, n) for n in array.shape)
    return dims + integer(2, number if number is not None else NUMBERS[array.dtype]) + part(8, name) + part(9, np.ascontiguousarray(array).tobytes())


def attribute(name: str, value: Any) -> bytes:
    """An `AttributeProto`; a `Graph` is bytes in a list of one with the name of the attribute."""
    found = part(1, name)
    if isinstance(value, bool | int):
        return found + integer(3, int(value)) + integer(20, 2)
    if isinstance(value, float):
        return found + varint(2 << 3 | 5) + struct.pack("<f", value) + integer(20, 1)
    if isinstance(value, str):
        return found + part(4, value) + integer(20, 3)
    if isinstance(value, np.ndarray):
        return found + part(5, tensor(value)) + integer(20, 4)
    if isinstance(value, bytes):
        return found + part(6, value) + integer(20, 5)
    if all(isinstance(v, int) for v in value):
        return found + b"".join(integer(8, v) for v in value) + integer(20, 7)
    if all(isinstance(v, str) for v in value):
        return found + b"".join(part(9, v) for v in value) + integer(20, 8)
    return found + b"".join(varint(7 << 3 | 5) + struct.pack("<f", v) for v in value) + integer(20, 6)


def node(op: str, inputs: Sequence[str], outputs: Sequence[str], name: str = "", domain: str = "", **attributes: Any) -> bytes:
    """A `NodeProto`."""
    found = b"".join(part(1, i) for i in inputs) + b"".join(part(2, o) for o in outputs)
    found += part(3, name) + part(4, op) + b"".join(part(5, attribute(n, v)) for n, v in attributes.items())
    return found + (part(7, domain) if domain else b"")


def value(name: str, dtype: Any = np.float32, dims: Sequence[int | str] | None = None) -> bytes:
    """A `ValueInfoProto`."""
    shape = b"" if dims is None else part(2, b"".join(part(1, integer(1, d) if isinstance(d, int) else part(2, d)) for d in dims))
    return part(1, name) + part(2, part(1, integer(1, NUMBERS[np.dtype(dtype)]) + shape))


def graph(nodes: Sequence[bytes], inputs: Sequence[bytes], outputs: Sequence[str], weights: dict[str, Any] | None = None, name: str = "graph") -> bytes:
    """A `GraphProto`."""
    found = b"".join(part(1, n) for n in nodes) + part(2, name)
    found += b"".join(part(5, tensor(array, key)) for key, array in (weights or {}).items())
    return found + b"".join(part(11, i) for i in inputs) + b"".join(part(12, part(1, o)) for o in outputs)


def model(nodes: Sequence[bytes], inputs: Sequence[bytes], outputs: Sequence[str], weights: dict[str, Any] | None = None, opset: int = 18) -> bytes:
    """A `ModelProto`."""
    return of_graph(graph(nodes, inputs, outputs, weights), opset)


def of_graph(data: bytes, opset: int = 18) -> bytes:
    return integer(1, 9) + part(2, "tests") + part(7, data) + part(8, part(1, "") + integer(2, opset)) + part(8, part(1, "com.microsoft") + integer(2, 1))


def single(op: str, inputs: Sequence[Any], outputs: int = 1, opset: int = 18, domain: str = "", constants: Sequence[int] = (), **attributes: Any) -> tuple[bytes, dict[str, np.ndarray]]:
    """A model of one node, and its inputs. Inputs whose positions are in `constants` are weights; None is an input left out."""
    names = [f"x{n}" if array is not None else "" for n, array in enumerate(inputs)]
    arrays = {name: np.asarray(array) for name, array in zip(names, inputs, strict=True) if array is not None}
    weights = {f"x{n}": arrays.pop(f"x{n}") for n in constants}
    results = [f"y{n}" for n in range(outputs)]
    given = [value(name, array.dtype, array.shape) for name, array in arrays.items()]
    return model([node(op, names, results, "tested", domain, **attributes)], given, results, weights, opset), arrays
