"""Each op of tapes against NumPy in float64, at odd shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tilewright as tw

RNG = np.random.default_rng(7)


def floats(*shape: int, dtype: Any = np.float32, low: float = -2.0, high: float = 2.0) -> np.ndarray:
    return np.asarray(RNG.uniform(low, high, shape)).astype(dtype)


def ints(*shape: int, low: int = -9, high: int = 9, dtype: Any = np.int64) -> np.ndarray:
    return np.asarray(RNG.integers(low, high, shape)).astype(dtype)


def tape_of(op: str, arrays: list[np.ndarray], attributes: dict[str, Any], frozen: tuple[int, ...] = ()) -> tw.mega.Tape:
    tape = tw.mega.Tape("one")
    slots = [tape.frozen(f"c{n}", a) if n in frozen else tape.input(f"x{n}", a.shape, a.dtype) for n, a in enumerate(arrays)]
    tape.output("y", tape.emit(op, *slots, **attributes))
    return tape


def close(found: np.ndarray, wanted: np.ndarray, dtype: Any) -> None:
    assert found.shape == wanted.shape
    if np.dtype(dtype).kind in "iub":
        assert np.array_equal(found, wanted.astype(dtype))
        return
    step = float(ml_dtypes.finfo(dtype).eps)
    scale = max(1.0, float(np.abs(wanted[np.isfinite(wanted)]).max(initial=1.0)))
    assert np.array_equal(np.isnan(found.astype(np.float64)), np.isnan(wanted))
    finite = np.isfinite(wanted)
    assert np.array_equal(found.astype(np.float64)[~finite & ~np.isnan(wanted)], wanted[~finite & ~np.isnan(wanted)])
    assert np.abs(found.astype(np.float64) - wanted)[finite].max(initial=0.0) <= 8 * step * scale


def wide(array: np.ndarray) -> np.ndarray:
    return array if array.dtype.kind in "iub" else array.astype(np.float64)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def softmax(x: np.ndarray, axis: int = -1) -> np.ndarray:
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def rms(x: np.ndarray, g: np.ndarray, axis: int = -1, epsilon: float = 1e-6) -> np.ndarray:
    axes = tuple(range(axis % x.ndim, x.ndim))
    return x / np.sqrt((x * x).mean(axes, keepdims=True) + epsilon) * g


def scattered(x: np.ndarray, at: np.ndarray, updates: np.ndarray) -> np.ndarray:
    made = x.copy()
    for n in np.ndindex(*at.shape[:-1]):
        made[tuple(at[n])] = updates[n]
    return made


BF16 = ml_dtypes.bfloat16
POSITIVE = floats(31, 3, low=0.1)
Case = tuple[str, list[np.ndarray], dict[str, Any], Callable[..., np.ndarray], tuple[int, ...]]
CASES: dict[str, Case] = {
    "Add": ("Add", [floats(31, 7), floats(7)], {}, np.add, ()),
    "Add ints": ("Add", [ints(5, 1, 3), ints(1, 2, 1)], {}, np.add, ()),
    "Add numbers": ("Add", [floats(), floats()], {}, np.add, ()),
    "Sub": ("Sub", [floats(1, 33), floats(3, 1)], {}, np.subtract, ()),
    "Mul": ("Mul", [floats(2, 1, 5), floats(3, 5)], {}, np.multiply, ()),
    "Mul bf16": ("Mul", [floats(33, dtype=BF16), floats(33, dtype=BF16)], {}, np.multiply, ()),
    "Div": ("Div", [floats(31), floats(31, low=0.5)], {}, np.divide, ()),
    "Div ints": ("Div", [ints(31), ints(31, low=1)], {}, lambda a, b: np.trunc(a / b).astype(np.int64), ()),
    "Pow": ("Pow", [floats(31, low=0.1), floats(31)], {}, np.power, ()),
    "Pow special": (
        "Pow", [np.array([0, -0.0, -2, -2, np.inf, -np.inf, np.nan, 1, -1, 0, 2], np.float32), np.array([0, -1, 3, 0.5, -1, 0.5, 0, np.nan, np.inf, -2, -np.inf], np.float32)], {}, np.power, (),
    ),
    "Pow ints": ("Pow", [ints(13, low=-5, high=6), ints(13, low=0, high=5)], {}, np.power, ()),
    **{op: (op, [floats(31, 3)], {}, compute, ()) for op, compute in {"Exp": np.exp, "Tanh": np.tanh, "Neg": np.negative, "Abs": np.abs, "Cos": np.cos, "Sin": np.sin, "Silu": silu}.items()},
    **{op: (op, [POSITIVE], {}, compute, ()) for op, compute in {"Log": np.log, "Sqrt": np.sqrt, "Rsqrt": lambda x: 1 / np.sqrt(x)}.items()},
    "Neg ints": ("Neg", [ints(17)], {}, np.negative, ()),
    "Exp empty": ("Exp", [floats(0, 3)], {}, np.exp, ()),
    "Sqrt nan": ("Sqrt", [np.array([-1, np.nan, np.inf, 4], np.float32)], {}, np.sqrt, ()),
    "AddScalar": ("AddScalar", [floats(33)], {"scalar": 1.5}, lambda x: x + 1.5, ()),
    "SubScalar": ("SubScalar", [floats(33)], {"scalar": -2}, lambda x: x + 2, ()),
    "MulScalar": ("MulScalar", [floats(1)], {"scalar": 1e-8}, lambda x: x * 1e-8, ()),
    "MulScalar infinite": ("MulScalar", [floats(5)], {"scalar": float("inf")}, lambda x: x * np.inf, ()),
    "MulScalar nan": ("MulScalar", [floats(5)], {"scalar": float("nan")}, lambda x: x * np.nan, ()),
    "DivScalar": ("DivScalar", [floats(31)], {"scalar": 3}, lambda x: x / 3, ()),
    "DivScalar ints": ("DivScalar", [ints(31)], {"scalar": 4}, lambda x: np.trunc(x / 4).astype(np.int64), ()),
    "PowScalar": ("PowScalar", [floats(31)], {"scalar": 3}, lambda x: x**3, ()),
    "PowScalar half": ("PowScalar", [np.array([4, -0.0, -np.inf, -4, 0], np.float32)], {"scalar": 0.5}, lambda x: np.power(x, 0.5), ()),
    "RMSNorm": ("RMSNorm", [floats(3, 33), floats(33)], {"epsilon": 1e-5}, lambda x, g: rms(x, g, epsilon=1e-5), (1,)),
    "RMSNorm axes": ("RMSNorm", [floats(5, 3, 7), floats(3, 7)], {"axis": 1}, lambda x, g: rms(x, g, 1), ()),
    "Softmax": ("Softmax", [floats(3, 1, 31)], {}, softmax, ()),
    "Softmax axis": ("Softmax", [floats(3, 31, 2)], {"axis": 1}, lambda x: softmax(x, 1), ()),
    "ReduceSum": ("ReduceSum", [floats(3, 33)], {"axes": [1]}, lambda x: x.sum(1, keepdims=True), ()),
    "ReduceSum all": ("ReduceSum", [ints(3, 5)], {"keepdims": 0}, lambda x: np.asarray(x.sum()), ()),
    "ReduceMean": ("ReduceMean", [floats(2, 31, 3)], {"axes": [0, -1], "keepdims": 0}, lambda x: x.mean((0, 2)), ()),
    "Sum": ("Sum", [floats(3, 1), floats(7), floats(3, 7)], {}, lambda a, b, c: a + b + c, ()),
    "Sum axes": ("Sum", [floats(3, 7)], {"axes": [0], "keepdims": 0}, lambda x: x.sum(0), ()),
    "Max": ("Max", [floats(3, 1), floats(7)], {}, np.maximum, ()),
    "Max axes": ("Max", [floats(3, 7)], {"axes": [1]}, lambda x: x.max(1, keepdims=True), ()),
    "MatMul": ("MatMul", [floats(3, 33), floats(33, 7)], {}, np.matmul, ()),
    "MatMul frozen": ("MatMul", [floats(1, 31), floats(31, 5)], {}, np.matmul, (1,)),
    "MatMul batches": ("MatMul", [floats(2, 1, 3, 5), floats(7, 5, 2)], {}, np.matmul, ()),
    "MatMul vectors": ("MatMul", [floats(33), floats(33)], {}, lambda a, b: np.asarray(a @ b), ()),
    "MatMul turned": ("MatMul", [floats(5, 31), floats(7, 31)], {"transB": 1}, lambda a, b: a @ b.T, ()),
    "MatMul bf16 weight": ("MatMul", [floats(1, 31), floats(31, 7, dtype=BF16)], {}, np.matmul, (1,)),
    "MatMul f16 weight turned": ("MatMul", [floats(3, 31), floats(7, 31, dtype=np.float16)], {"transB": 1}, lambda a, b: a @ b.T, (1,)),
    "Gather": ("Gather", [floats(7, 3), ints(2, 2, low=-7, high=7)], {}, lambda x, i: x[i], ()),
    "Gather axis": ("Gather", [floats(3, 31), ints(5, low=0, high=31)], {"axis": 1}, lambda x, i: x[:, i], ()),
    "Slice": ("Slice", [floats(7, 33)], {"starts": [1, -2], "ends": [6, -33], "axes": [0, 1], "steps": [2, -3]}, lambda x: x[1:6:2, -2:-33:-3], ()),
    "Slice slots": ("Slice", [floats(7, 3), np.array([2]), np.array([100])], {}, lambda x, a, b: x[2:], (1, 2)),
    "Repeat": ("Repeat", [floats(3, 5)], {"axis": 1, "repeats": 3}, lambda x: np.repeat(x, 3, 1), ()),
    "Concat": ("Concat", [floats(3, 1), floats(3, 4), floats(3, 0)], {"axis": -1}, lambda *x: np.concatenate(x, -1), ()),
    "Reshape": ("Reshape", [floats(6, 5)], {"shape": [3, -1, 5]}, lambda x: x.reshape(3, 2, 5), ()),
    "Transpose": ("Transpose", [floats(2, 3, 5)], {"perm": [2, 0, 1]}, lambda x: x.transpose(2, 0, 1), ()),
    "Unsqueeze": ("Unsqueeze", [floats(3, 5)], {"axes": [0, 3]}, lambda x: x[None, :, :, None], ()),
    "Cast": ("Cast", [floats(31, low=-9, high=9)], {"to": tw.i32}, lambda x: np.trunc(x).astype(np.int32), ()),
    "Cast bf16": ("Cast", [floats(31)], {"to": "bf16"}, lambda x: x.astype(BF16), ()),
    "Expand": ("Expand", [floats(3, 1)], {"shape": [2, 1, 5]}, lambda x: np.broadcast_to(x, (2, 3, 5)), ()),
    "Trilu": ("Trilu", [floats(3, 7)], {"k": 1, "upper": 0}, lambda x: np.tril(x, 1), ()),
    "Trilu ints": ("Trilu", [ints(2, 5, 5)], {}, np.triu, ()),
    "Where": ("Where", [ints(3, 1, low=0, high=2, dtype=bool), floats(7), floats(3, 7)], {}, np.where, ()),
    "Greater": ("Greater", [floats(31), floats(1)], {}, np.greater, ()),
    "Equal": ("Equal", [ints(3, 5, low=0, high=2), ints(5, low=0, high=2)], {}, np.equal, ()),
    "ScatterND": ("ScatterND", [floats(7, 3), np.array([[2], [5], [2]]), floats(3, 3)], {}, scattered, (1,)),
    "Range": ("Add", [ints(5), np.arange(5)], {}, np.add, (1,)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_op_on_the_cpu(name: str) -> None:
    op, arrays, attributes, compute, frozen = CASES[name]
    with tw.mega.plan(tape_of(op, arrays, attributes, frozen)).compile("cpu").load() as runner:
        found = runner.launch({f"x{n}": a for n, a in enumerate(arrays) if n not in frozen})
    with np.errstate(all="ignore"):
        close(found, wide(np.asarray(compute(*map(wide, arrays)))), found.dtype)
    assert found.dtype == (np.dtype(bool) if op in ("Greater", "Equal") else found.dtype if op == "Cast" else (arrays[1] if op == "Where" else arrays[0]).dtype)


@pytest.mark.parametrize("name", ["Pow special", "RMSNorm", "Slice", "Reshape", "MatMul turned", "MatMul bf16 weight", "ScatterND", "Where"])
def test_op_in_the_emulator(name: str) -> None:
    """As one persistent kernel."""
    op, arrays, attributes, compute, frozen = CASES[name]
    with tw.mega.plan(tape_of(op, arrays, attributes, frozen)).compile("emulator").load() as runner:
        found = runner.launch({f"x{n}": a for n, a in enumerate(arrays) if n not in frozen})
    with np.errstate(all="ignore"):
        close(found, wide(np.asarray(compute(*map(wide, arrays)))), found.dtype)


def test_all_ops_are_covered() -> None:
    covered = {op for op, *_ in CASES.values()}
    elsewhere = {
        "MatMulNBits", "Shape", "Range", "ConstantOfShape", "AutoPositionIds", "AutoZeroKVCache", "KVCacheAppendK", "KVCacheAppendV", "KVCacheGetK",
        "KVCacheGetV", "KVCacheSeqLen",
    }  # fmt: skip
    assert covered | elsewhere == set(tw.mega.ops())
    assert len(tw.mega.ops()) == 52


def test_what_is_known_when_a_tape_is_planned() -> None:
    tape = tw.mega.Tape("planned")
    x = tape.input("x", (3, 5))
    shape = tape.emit("Shape", x)
    count = tape.emit("Range", start=0, limit=5, delta=2)
    half = tape.emit("Range", limit=1.0, delta=0.25)
    zeros = tape.emit("ConstantOfShape", shape, value=2.5)
    slots = tape.emit("Gather", shape, np.array([1]))
    flat = tape.emit("Reshape", x, tape.emit("Concat", slots, np.array([3]), axis=0))
    tape.output("y", tape.emit("Add", x, zeros))
    for name, slot in {"shape": shape, "count": count, "half": half, "flat": flat}.items():
        tape.output(name, slot)
    plan = tw.mega.plan(tape)
    assert sorted(plan.found.constants) == ["count", "half", "shape"]
    given = floats(3, 5)
    with plan.compile().load() as runner:
        found = runner.launch(given)
    assert np.array_equal(found["y"], given + np.float32(2.5)) and found["flat"].shape == (5, 3)
    assert found["shape"].tolist() == [3, 5] and found["count"].tolist() == [0, 2, 4] and found["half"].tolist() == [0, 0.25, 0.5, 0.75]


def test_ranges_of_data_are_refused() -> None:
    tape = tw.mega.Tape("late")
    n = tape.input("n", (), tw.i64)
    tape.output("y", tape.emit("Range", tape.frozen("zero", np.asarray(0)), n, tape.frozen("one", np.asarray(1))))
    with pytest.raises(tw.UserError, match=r"instruction 0 \(Range\): input 1 \('n'\) decides about shapes"):
        tw.mega.plan(tape)


@pytest.mark.parametrize(("bits", "rows"), [(4, 1), (4, 9), (8, 1), (2, 3)])
def test_products_with_packed_weights(bits: int, rows: int) -> None:
    columns, depth, block = 5, 70, 32
    blocks = -(-depth // block)
    numbers = ints(columns, blocks, block, low=0, high=1 << bits, dtype=np.uint8)
    scales = floats(columns, blocks, low=0.05, high=0.2)
    per = 8 // bits
    packed = np.zeros((columns, blocks, block // per), np.uint8)
    for k in range(per):
        packed |= numbers[:, :, k::per] << np.uint8(bits * k)
    tape = tw.mega.Tape("packed")
    x = tape.input("x", (rows, depth))
    slots = tape.frozen("w", packed), tape.frozen("s", scales.reshape(-1))
    tape.output("y", tape.emit("MatMulNBits", x, *slots, N=columns, K=depth, bits=bits, block_size=block))
    given = floats(rows, depth)
    with tw.mega.plan(tape).compile().load() as runner:
        found = runner.launch(given)
    weight = ((numbers.astype(np.float64) - (1 << (bits - 1))) * scales[:, :, None]).reshape(columns, -1)[:, :depth]
    close(found, given.astype(np.float64) @ weight.T, np.float32)


def test_blocks_of_packed_weights() -> None:
    """Weights of packed dtypes, given later, in a product and in a gather."""
    weight = floats(33, 64)
    tape = tw.mega.Tape("blocks")
    ids = tape.input("ids", (3,), tw.i64)
    w = tape.frozen("w", shape=(33, 64), dtype=tw.q8_0)
    tape.output("y", tape.emit("MatMul", tape.emit("Gather", w, ids), w, transB=1))
    packed = tw.quantize(weight, tw.q8_0)
    exact = tw.dequantize(packed).astype(np.float64)
    with tw.mega.plan(tape).compile().load() as runner:
        runner.set_weights(w=packed)
        found = runner.launch(np.array([0, 32, 7]))
    close(found, exact[[0, 32, 7]] @ exact.T, np.float32)
    other = tw.mega.Tape("columns")
    other.output("y", other.emit("MatMul", other.input("x", (1, 33)), other.frozen("w", packed)))
    with pytest.raises(tw.UserError, match="packed along its columns"):
        tw.mega.plan(other)


@pytest.mark.parametrize(("batch", "device"), [(None, "cpu"), (2, "cpu"), (2, "emulator")])
def test_caches(batch: int | None, device: str) -> None:
    capacity, heads, depth = 7, 3, 5
    front = () if batch is None else (batch,)
    tape = tw.mega.Tape("caches")
    tape.kv_cache(2, capacity, heads, depth, batch=batch)
    rows = tape.input("rows", (*front, 1, heads, depth))
    before = tape.emit("KVCacheGetK", layer=1)
    tape.emit("KVCacheAppendK", rows, layer=1)
    tape.emit("KVCacheAppendV", tape.emit("Neg", rows), layer=1)
    for name, slot in {
        "before": tape.emit("AddScalar", before, scalar=1), "keys": tape.emit("KVCacheGetK", layer=1), "values": tape.emit("KVCacheGetV", layer=1), "length": tape.emit("KVCacheSeqLen"),
        "at": tape.emit("AutoPositionIds", tokens=3, dtype=tw.i32), "zeros": tape.emit("AutoZeroKVCache"),
    }.items():  # fmt: skip
        tape.output(name, slot)
    keys, values = ([np.zeros((*front, capacity, heads, depth), np.float32) for _ in range(2)] for _ in range(2))
    with tw.mega.plan(tape).compile(device).load() as runner:
        runner.set_kv_cache(keys, values)
        for position in range(3):
            old = keys[1].copy()
            given = floats(*front, 1, heads, depth)
            at: Any = position if batch is None else np.array([position, position + 2])
            found = runner.launch(given, at)
            places = np.atleast_1d(at)
            for s, place in enumerate(places):
                own = (keys[1], values[1]) if batch is None else (keys[1][s], values[1][s])
                row = given[0] if batch is None else given[s, 0]
                assert np.array_equal(own[0][place], row) and np.array_equal(own[1][place], -row)
            assert np.array_equal(found["before"], old + 1) and np.array_equal(found["keys"], keys[1]) and np.array_equal(found["values"], values[1])
            assert found["length"].tolist() == (places + 1).tolist() and found["length"].dtype == np.int64
            assert found["at"].tolist() == [[p, p + 1, p + 2] for p in places.tolist()] and found["at"].dtype == np.int32
            assert found["zeros"].shape == keys[1].shape and not found["zeros"].any() and not keys[0].any()
