"""Random numbers on every device: the same bits, by the law of docs/random.md, in kernels and as arrays."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

import kernels_random as kernels
import random_reference as reference
import tilewright as tw
from assembled import assemble
from tilewright.cli.main import cli

EMULATED = ("emulator:loop", "emulator:tile", "emulator:thread")
DEVICES = ("cpu", *EMULATED, pytest.param("cuda", marks=pytest.mark.requires("cuda")))
SEED = 0x9ABCDEF012345678 & ((1 << 63) - 1)


def same(a: object, b: object) -> bool:
    """The same bits."""
    x, y = np.ascontiguousarray(a), np.ascontiguousarray(b)
    return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()


# -- arrays -----------------------------------------------------------------------------------------------------------

FLOATS = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("count", [1, 31, 33, 70])
def test_uniform_arrays(dtype: str, count: int, device: str) -> None:
    found = np.asarray(tw.random.uniform(SEED, shape=count, dtype=dtype, device=device))
    assert found.dtype == FLOATS[dtype]
    assert same(found, np.array([reference.uniform(SEED, e, dtype=dtype) for e in range(count)], FLOATS[dtype]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [1, 31, 33, 70])
def test_bits_arrays(count: int, device: str) -> None:
    for bits, dtype in ((32, tw.u32), (64, tw.u64)):
        assert same(tw.random.bits(SEED, shape=count, dtype=dtype, device=device), reference.words(SEED, count, bits))


@pytest.mark.parametrize("dtype", FLOATS)
def test_normal_arrays(dtype: str) -> None:
    count = 333
    found = tw.random.normal(SEED, shape=count, dtype=dtype)
    exact = np.array([reference.normal(SEED, e, dtype="f64" if dtype == "f64" else "f32") for e in range(count)])
    digits = {"f16": 2**-10, "bf16": 2**-7, "f32": 8 * 2**-23, "f64": 16 * 2**-52}[dtype]
    assert np.max(np.abs(found.astype(np.float64) - exact) / np.abs(exact)) <= digits
    for device in EMULATED:
        assert same(tw.random.normal(SEED, shape=count, dtype=dtype, device=device), found)


@pytest.mark.requires("cuda")
@pytest.mark.parametrize("dtype", FLOATS)
def test_normal_arrays_on_a_gpu(dtype: str) -> None:
    assert same(np.asarray(tw.random.normal(SEED, shape=1 << 16, dtype=dtype, device="cuda").numpy()), tw.random.normal(SEED, shape=1 << 16, dtype=dtype))


@pytest.mark.parametrize(("dtype", "low", "high"), [
    (tw.i64, -5, 12), (tw.i32, -(2**31), 2**31), (tw.u32, 0, 2**32), (tw.i64, -(2**63), 2**63 - 1), (tw.u64, 3, 2**64 - 1), (tw.i32, 7, 8),
])  # fmt: skip
def test_randint_arrays(dtype: tw.DType, low: int, high: int) -> None:
    found = tw.random.randint(SEED, low, high, shape=(7, 11), dtype=dtype)
    assert found.dtype == dtype.numpy
    assert found.reshape(-1).tolist() == [reference.randint(SEED, low, high, e) for e in range(77)]
    for device in EMULATED:
        assert same(tw.random.randint(SEED, low, high, shape=(7, 11), dtype=dtype, device=device), found)


def test_defaults() -> None:
    kinds = [f(1, shape=3).dtype for f in (tw.random.uniform, tw.random.normal, tw.random.bits)]
    assert kinds == [np.float32, np.float32, np.uint32] and tw.random.randint(1, 0, 9, shape=3).dtype == np.int64


def test_published_vectors_through_arrays() -> None:
    """The three of Random123: counter 0, all ones, and digits of pi."""
    assert [hex(w) for w in tw.random.bits(0, shape=4)] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]
    words = tw.random.bits(0x299F31D0A4093822, 0x0370734413198A2E, shape=1)  # any first element of that stream
    assert int(words[0]) == reference.word(0x299F31D0A4093822, 0x0370734413198A2E, 0)

    @tw.kernel
    def at(x: tw.Array, key: tw.u64, high: tw.u64) -> tw.Array:
        out = tw.empty((len(x),), tw.u32)
        for i in tw.grid(len(x)):
            out[i] = tw.random.bits(key, high, x[i])
        return out

    block = 0x85A308D3243F6A88 - (1 << 63)
    places = np.array([4 * block + k for k in range(4)], np.uint64)
    for device in ("cpu", *EMULATED):
        found = at(places, np.uint64(0x299F31D0A4093822), np.uint64(0x0370734413198A2E), device=device)
        assert [hex(w) for w in found] == ["0xd16cfe09", "0x94fdcceb", "0x5001e420", "0x24126ea1"]
        ones = np.uint64((1 << 64) - 1)
        word = at_64(np.array([ones - np.uint64(1), ones], np.uint64), ones, ones, device=device)
        assert [hex(w) for w in word] == ["0x41c83b0e408f276d", "0x6d5451fda20bc7c6"]


@tw.kernel
def at_64(x: tw.Array, key: tw.u64, high: tw.u64) -> tw.Array:
    out = tw.empty((len(x),), tw.u64)
    for i in tw.grid(len(x)):
        out[i] = tw.random.bits(key, high, x[i], dtype=tw.u64)
    return out


def test_shape_and_layout_do_not_matter() -> None:
    flat = tw.random.normal(7, 2, shape=6 * 5 * 4)
    assert same(tw.random.normal(7, 2, shape=(6, 5, 4)).reshape(-1), flat)
    for out in (
        np.zeros((6, 5, 4), np.float32), np.zeros((6, 4, 5), np.float32).transpose(0, 2, 1), np.zeros((6, 5, 8), np.float32)[:, :, ::2],
        np.zeros((6, 5, 4), np.float32)[::-1], np.zeros(240, np.float32)[::-2], np.zeros(121, np.float32)[1:],
    ):  # fmt: skip
        assert tw.random.normal(7, 2, out=out) is out
        assert same(np.ascontiguousarray(out).reshape(-1), flat)
    assert tw.random.uniform(7, shape=(0, 3)).shape == (0, 3)
    assert same(tw.random.uniform(7, shape=()), np.float32(reference.uniform(7, 0)))


def test_indices_before_the_place() -> None:
    """What array functions give is what kernels give with the place as the last index."""
    for index in ((), (5,), (5, 6), (1 << 63, 3, 2), (1, 2, 3, 4)):
        assert tw.random.bits(9, *index, shape=11).tolist() == [reference.word(9, *index, e) for e in range(11)]


# -- kernels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [1, 33, 150])
def test_all_kinds(count: int, device: str) -> None:
    x = np.zeros(count, np.float32)
    words, long, low, high, dice, bell, wide = (np.asarray(r) for r in kernels.all_kinds(x, SEED, device=device))
    places = range(count)
    assert words.tolist() == [reference.word(SEED, i) for i in places]
    assert long.tolist() == [reference.word(SEED, 5, i, bits=64) for i in places]
    assert low.tolist() == [reference.uniform(SEED, 1, 2, i, dtype="f16") for i in places]
    assert high.tolist() == [reference.uniform(SEED, i, i, dtype="f64") for i in places]
    assert dice.tolist() == [reference.randint(SEED, 1, 7, 3, 2, 1, i) for i in places]
    assert np.allclose(bell, [reference.normal(SEED, i) for i in places], rtol=1e-6, atol=0)
    assert np.allclose(wide, [reference.normal(SEED, i, 9, dtype="f64") for i in places], rtol=4e-15, atol=0)
    on_cpu = kernels.all_kinds(x, SEED, device="cpu")
    assert same(bell, on_cpu[5]) and same(wide, on_cpu[6])


@pytest.mark.parametrize("device", DEVICES)
def test_dropout(device: str) -> None:
    x = np.arange(7 * 45, dtype=np.float32).reshape(7, 45)
    found = np.asarray(kernels.dropout(x, 3, 0.75, device=device))
    kept = np.array([[reference.uniform(3, i, j) < 0.75 for j in range(45)] for i in range(7)])
    assert same(found, np.where(kept, x / np.float32(0.75), np.float32(0)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("by", range(5))
def test_neighbours_that_begin_anywhere(by: int, device: str) -> None:
    count = 200
    found = np.asarray(kernels.shifted(np.zeros(count, np.float32), 11, by, device=device))
    assert same(found, reference.words(11, count + by)[by:])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint64, np.uint8])
def test_indices_from_data(dtype: type, device: str) -> None:
    places = np.random.default_rng(1).integers(0, min(int(np.iinfo(dtype).max), 1 << 62), 77).astype(dtype)
    found = np.asarray(kernels.places_from_data(places, np.uint64(1 << 63), device=device))
    assert found.tolist() == [reference.word(1 << 63, int(i)) for i in places]


def test_negative_indices_from_data_wrap() -> None:
    places = np.array([-1, -2, -(2**63)], np.int64)
    assert kernels.places_from_data(places, np.uint64(5)).tolist() == [reference.word(5, int(i) + (1 << 64)) for i in places]
    assert kernels.places_from_data(places[:2].astype(np.int16), np.uint64(5)).tolist() == [reference.word(5, (1 << 64) - k) for k in (1, 2)]


@pytest.mark.parametrize("device", DEVICES)
def test_the_last_index_need_not_be_the_innermost(device: str) -> None:
    found = np.asarray(kernels.columns(np.zeros((5, 37), np.float32), 8, device=device))
    assert found.tolist() == [[reference.uniform(8, j, i) for j in range(37)] for i in range(5)]


@pytest.mark.parametrize("device", DEVICES)
def test_draws_in_sums_and_serial_loops(device: str) -> None:
    n = 500
    wanted = np.mean([4.0 * (np.hypot(reference.uniform(4, 0, i), reference.uniform(4, 1, i)) < 1) for i in range(n)])
    assert abs(float(kernels.inside(np.zeros(n), 4, device=device)) - wanted) < 1e-12
    start = np.arange(6.0)
    found = np.asarray(kernels.walk(start, 4, 5, device=device))
    assert np.allclose(found, [i + sum(reference.normal(4, i, t, dtype="f64") for t in range(5)) for i in range(6)], rtol=1e-14)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_bounds_from_data(dtype: type, device: str) -> None:
    low = np.array([0, -5, 3, 3, 9, -100, 0], dtype)
    high = np.array([1, 5, 3, 2, 1000, -99, np.iinfo(dtype).max], dtype)
    found = np.asarray(kernels.between(low, high, 6, device=device))
    pairs = zip(low.tolist(), high.tolist(), strict=True)
    assert found.tolist() == [reference.randint(6, a, b, i) if a < b else a for i, (a, b) in enumerate(pairs)]


@pytest.mark.parametrize("device", ["cpu", "emulator", pytest.param("cuda", marks=pytest.mark.requires("cuda"))])
def test_explicit_kernels(device: str) -> None:
    count = 150
    arrays = [np.zeros(count, d) for d in (np.uint32, np.float64, np.int32, np.float16)]
    kernels.explicit[2, 96](*arrays, 21, device=device)
    words, numbers, dice, bell = arrays
    assert same(words, reference.words(21, count))
    assert numbers.tolist() == [reference.uniform(21, 3, i, dtype="f64") for i in range(count)]
    assert dice.tolist() == [reference.randint(21, -3, 4, 1, 2, i) for i in range(count)]
    assert same(bell, tw.random.normal(21, shape=count, dtype=tw.f16))


def test_simd_functions() -> None:
    out = np.zeros(101, np.float32)
    kernels.simd_loop(out, 5)
    assert same(out, tw.random.uniform(5, shape=101))


def test_zynml() -> None:
    program = tw.load("""
    fn noise(seed, i, j): return random.normal(seed, i, j) * 0.5
    let y = compute(x, seed) {
        for i in 0..rows, j in 0..cols:
            let kept = random.uniform(seed, i, j) < 0.5
            out[i, j] = x[i, j] + noise(seed, 1, j) if kept else f32(random.randint(seed, 0, 10, i, j))
    }
    let z = compute(x) { for i in 0..rows: out[i] = random.bits(7, i, dtype=u64) + u64(x[i, 0] * 0.0) }
    """)
    x = np.arange(3 * 21, dtype=np.float32).reshape(3, 21)
    results = program.run(x=x, seed=13)
    assert results["z"].tolist() == [reference.word(7, i, bits=64) for i in range(3)]
    for i in range(3):
        for j in range(21):
            kept = reference.uniform(13, i, j) < 0.5
            wanted = x[i, j] + 0.5 * reference.normal(13, 1, j) if kept else reference.randint(13, 0, 10, i, j)
            assert abs(results["y"][i, j] - wanted) < 1e-5
    for device in EMULATED:
        assert same(program.run(x=x, seed=13, device=device)["y"], results["y"])


def test_an_import_called_random_stands_before_the_word(tmp_path: object) -> None:
    (tmp_path / "own.zyn").write_text("fn uniform(a, b): return a + b\n")  # type: ignore[operator]
    (tmp_path / "main.zyn").write_text('import "own.zyn" as random\nlet y = compute(x) { for i in 0..n: out[i] = random.uniform(x[i], 2.0) }\n')  # type: ignore[operator]
    assert tw.load(tmp_path / "main.zyn").run(x=np.ones(3, np.float32))["y"].tolist() == [3, 3, 3]  # type: ignore[operator]


def _examples() -> tuple[object, ...]:
    path = Path(__file__).parents[2] / "examples" / "monte_carlo.py"
    specification = importlib.util.spec_from_file_location("example_monte_carlo", path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return tuple(module.EXAMPLES)


@pytest.mark.parametrize("device", ["cpu", "emulator", pytest.param("cuda", marks=pytest.mark.requires("cuda"))])
@pytest.mark.parametrize("example", _examples(), ids=lambda e: e.name)
def test_examples_against_numpys_philox(example: Any, device: str) -> None:
    for number in (1, 3000, 40000) if device != "emulator" else (3000,):
        inputs = example.make(np.random.default_rng(number), number)
        run = tw.load(example.program).run if isinstance(example.program, Path) else None
        found = run(**inputs, device=device)[example.result] if run else example.program(*inputs.values(), device=device)
        wanted = example.reference(*(x.astype(np.float64) if isinstance(x, np.ndarray) and x.dtype.kind == "f" else x for x in inputs.values()))
        assert np.abs(np.asarray(found, np.float64) - wanted).max() <= example.tolerance * max(1.0, np.abs(wanted).max())


# -- code -------------------------------------------------------------------------------------------------------------


@pytest.mark.requires("ptxas")
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_ptx_assembles(target: str) -> None:
    x = np.zeros(64, np.float32)
    for kernel, arguments in ((kernels.all_kinds, (x, 1)), (kernels.dropout, (x.reshape(8, 8), 1, 0.5)), (kernels.inside, (x, 1))):
        done = assemble(kernel.compile(*arguments, target=target).code.decode(), target)
        assert done.spills == 0


def _multiplications(dtype: str, target: str) -> int:
    from tilewright.execute.random_arrays import _uniform

    program = _uniform.stages(np.zeros(64, FLOATS[dtype]), np.uint64(1), target=target).stages.thread
    from tilewright.ir.nodes import walk

    return sum(op.opcode == "mul" and str(op.results[0].type) in ("u64", "vec<u64, 4>") for op in walk(program.calls[0].kernel.body))


def test_neighbours_share_blocks() -> None:
    """On a GPU a thread's four numbers cost the products of one block and not of four: 20, less the one of a counter's upper half, which is 0.
    The code is there twice, for whole tiles and for the edge."""
    assert _multiplications("f32", "sm_90a") == 2 * 19


# -- statistics -------------------------------------------------------------------------------------------------------

COUNT = 1 << 20


def _chi_square(counts: np.ndarray) -> float:
    """How many deviations the statistic lies off its mean."""
    expected = counts.sum() / counts.size
    statistic = float(((counts - expected) ** 2).sum() / expected)
    freedom = counts.size - 1
    return (statistic - freedom) / np.sqrt(2 * freedom)


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_uniformity(dtype: str) -> None:
    u = tw.random.uniform(12345, shape=COUNT, dtype=dtype)
    assert u.min() >= 0 and u.max() < 1
    assert abs(_chi_square(np.bincount((u * 1024).astype(np.int64), minlength=1024))) < 4
    ordered = np.sort(u.astype(np.float64))
    gap = np.max(np.abs(ordered - (np.arange(COUNT) + 0.5) / COUNT))
    assert gap * np.sqrt(COUNT) < 1.95  # Kolmogorov and Smirnov: once in a thousand
    digits = {"f32": 24, "f64": 53}[dtype]
    words = (u.astype(np.float64) * 2.0**digits).astype(np.uint64)
    for bit in range(digits):
        ones = int(((words >> np.uint64(bit)) & np.uint64(1)).sum())
        assert abs(ones - COUNT / 2) < 5 * np.sqrt(COUNT) / 2


def test_pairs_fill_the_square() -> None:
    u = tw.random.uniform(77, shape=COUNT)
    for a, b in ((u[::2], u[1::2]), (u[: COUNT // 2], u[COUNT // 2 :])):
        cells = (a * 32).astype(np.int64) * 32 + (b * 32).astype(np.int64)
        assert abs(_chi_square(np.bincount(cells, minlength=1024))) < 4


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    """In deviations."""
    return float(np.corrcoef(a, b)[0, 1] * np.sqrt(a.size))


def test_no_correlation() -> None:
    """Along a stream, between streams of neighbouring seeds and of neighbouring indices, and between tuples of other lengths."""
    u = tw.random.uniform(1, shape=COUNT).astype(np.float64)
    for lag in (1, 2, 3, 4, 5, 8, 64, 1024):
        assert abs(_correlation(u[:-lag], u[lag:])) < 4.5
    others = [(0, ()), (2, ()), (1 << 32, ()), (1, (0,)), (1, (1,)), (1, (0, 0)), (1, (0, 1)), (1, (1, 0)), (1, (0, 0, 0))]
    streams = [tw.random.uniform(seed, *index, shape=COUNT).astype(np.float64) for seed, index in others]
    for stream in streams:
        assert abs(_correlation(u, stream)) < 4.5
    assert abs(_correlation(streams[3], streams[4])) < 4.5


def test_streams_have_no_word_in_common() -> None:
    """2^16 words of 64 bits of each of 20 streams: no two alike but by chance, which is 2^-23."""
    indices = [(), (0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 1), (0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (1 << 63,), ((1 << 64) - 1,)]
    words = np.concatenate([tw.random.bits(5, *i, shape=1 << 16, dtype=tw.u64) for i in indices])
    assert np.unique(words).size == words.size


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_moments_and_tails(dtype: str) -> None:
    z = tw.random.normal(99, shape=COUNT, dtype=dtype).astype(np.float64)
    for power, wanted, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(np.mean(z**power) - wanted) < 4.5 * np.sqrt(variance / COUNT)
    for limit, beyond in ((1.0, 0.31731050786), (2.0, 0.04550026390), (3.0, 0.00269979606), (4.0, 6.33424837e-5)):
        share = COUNT * beyond
        assert abs(np.sum(np.abs(z) > limit) - share) < 4.5 * np.sqrt(share)
    cells = np.searchsorted(np.sort(z), [reference.quantile(k << 22, 32) for k in range(1, 1024)])
    assert abs(_chi_square(np.diff([0, *cells, COUNT]))) < 4


def test_dice_are_fair() -> None:
    assert abs(_chi_square(np.bincount(tw.random.randint(3, 0, 6, shape=COUNT)))) < 4
    large = tw.random.randint(3, 0, 3 << 29, shape=COUNT, dtype=tw.i32)
    assert abs(_chi_square(np.bincount(large % 3, minlength=3))) < 4


def test_numpys_philox_draws_alike() -> None:
    """Another width of the same family: the same moments and the same quantiles."""
    other = np.random.Generator(np.random.Philox(key=1)).random(COUNT, np.float32)
    ours = tw.random.uniform(1, shape=COUNT)
    assert np.max(np.abs(np.quantile(other, np.linspace(0, 1, 101)) - np.quantile(ours, np.linspace(0, 1, 101)))) < 4e-3


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("call", "code", "text"), [
    (lambda: tw.random.uniform(-1, shape=3), "TW013", "the seed of tw.random.uniform is -1"),
    (lambda: tw.random.uniform(1 << 64, shape=3), "TW013", "18446744073709551616"),
    (lambda: tw.random.uniform(1, 1 << 64, shape=3), "TW013", "the index of tw.random.uniform is 18446744073709551616"),
    (lambda: tw.random.normal(1, -5, shape=3), "TW013", "is -5"),
    (lambda: tw.random.normal(1.5, shape=3), "TW009", "is 1.5"),
    (lambda: tw.random.normal(True, shape=3), "TW009", "is True"),
    (lambda: tw.random(), "TW005", "tw.random is no function"),
    (lambda: tw.random.normal(1), "TW016", "needs shape= or out="),
    (lambda: tw.random.normal(1, shape=3, dtype=tw.i32), "TW006", "gives no i32"),
    (lambda: tw.random.bits(1, shape=3, dtype=tw.f32), "TW006", "gives no f32"),
    (lambda: tw.random.bits(1, out=np.zeros(3, np.float32)), "TW006", "gives no float32"),
    (lambda: tw.random.uniform(1, out=np.zeros(3, np.float32), dtype=tw.f64), "TW006", "out= holds f32"),
    (lambda: tw.random.uniform(1, out=np.zeros(3, np.float32), shape=4), "TW004", "shape [3]"),
    (lambda: tw.random.uniform(1, shape=(-1,)), "TW004", "(-1,)"),
    (lambda: tw.random.uniform(1, shape="3"), "TW009", "no shape"),
    (lambda: tw.random.randint(1, 3, 3, shape=2), "TW016", "no number from 3 on below 3"),
    (lambda: tw.random.randint(1, 0, 1 << 32, shape=2, dtype=tw.i32), "TW006", "bounds from -2147483648 to 2147483648"),
    (lambda: tw.random.randint(1, -1, 5, shape=2, dtype=tw.u32), "TW006", "bounds from 0"),
    (lambda: tw.random.randint(1, 0.5, 5, shape=2), "TW009", "is 0.5"),
])  # fmt: skip
def test_refused_arrays(call: object, code: str, text: str) -> None:
    with pytest.raises(tw.UserError) as info:
        call()  # type: ignore[operator]
    assert info.value.diagnostics[0].code == code and text in str(info.value)


@pytest.mark.parametrize(("drawn", "code", "text"), [
    ("random.uniform(3)", "TW016", "takes seed and one index or more"),
    ("random.uniform(3, -1)", "TW013", "the index of random.uniform() is -1"),
    ("random.uniform(-3, i)", "TW013", "the seed of random.uniform() is -3"),
    ("random.uniform(3, 0.5)", "TW006", "is an integer"),
    ("random.uniform(x[i], i)", "TW006", "is an integer, got f32"),
    ("random.uniform(3, i, dtype={t}i32)", "TW006", "gives no i32"),
    ("random.uniform(3, i, shape=4)", "TW016", "no argument 'shape'"),
    ("random.randint(3, 5, 5, i)", "TW016", "no number from 5 on below 5"),
    ("random.randint(3, 0, 4294967297, i, dtype={t}i32)", "TW006", "cannot reach"),
    ("random.uniforn(3, i)", "TW002", "uniforn"),
    ("random.randint(3, i)", "TW016", "takes seed, low, high and one index or more"),
])  # fmt: skip
def test_refused_in_kernels(drawn: str, code: str, text: str) -> None:
    from kernel_table import from_text

    lines = f"def bad(x: tw.Array) -> tw.Array:\n    (n,) = x.shape\n    out = tw.empty((n,), tw.f64)\n    for i in tw.grid(n):\n        out[i] = tw.{drawn.format(t='tw.')}\n    return out\n"
    x = np.zeros(3, np.float32)
    for run in (
        lambda: from_text(lines)(x), lambda: tw.load(f"let y = compute(x) {{ for i in 0..n: out[i] = {drawn.format(t='')} }}").run(x=x),
    ):  # fmt: skip
        with pytest.raises(tw.UserError) as info:
            run()
        assert info.value.diagnostics[0].code == code and text in str(info.value), str(info.value)
        assert info.value.diagnostics[0].span.line


def test_the_group_is_no_function() -> None:
    @tw.kernel
    def bad(x: tw.Array) -> tw.Array:
        out = tw.empty_like(x)
        for i in tw.grid(len(x)):
            out[i] = tw.random()
        return out

    with pytest.raises(tw.UserError, match=r"'tw.random' itself is not available in a kernel") as info:
        bad(np.zeros(3, np.float32))
    assert "tw.random.uniform(seed, i)" in str(info.value)


def test_names_of_files_that_are_only_read(tmp_path: Path) -> None:
    """`from tilewright import random` in a file that `tilewright check` and others read."""
    file = tmp_path / "drawn.py"
    for head, call in (("import tilewright as tw", "tw.random"), ("import tilewright as tw\nfrom tilewright import random as r", "r")):
        file.write_text(f"{head}\n@tw.kernel\ndef k(x: tw.Array):\n    out = tw.empty_like(x)\n    for i in tw.grid(len(x)):\n        out[i] = {call}.uniform(3, i)\n    return out\n")
        result = CliRunner().invoke(cli, ["check", str(file), "--args", "x=f32[*]"])
        assert result.exit_code == 0, result.output


def test_refused_in_explicit_kernels() -> None:
    out = np.zeros(3, np.float32)

    @tw.gpu
    def negative(out):
        out[tw.thread.x] = tw.random.uniform(3, -1)

    @tw.gpu
    def empty(out):
        out[tw.thread.x] = tw.f32(tw.random.randint(3, 5, 5, tw.thread.x))

    @tw.gpu
    def alone(out):
        out[tw.thread.x] = tw.random.uniform(3)

    @tw.gpu
    def misspelt(out):
        out[tw.thread.x] = tw.random.unifrm(3, 1)

    for kernel, code in ((negative, "TW013"), (empty, "TW016"), (alone, "TW016"), (misspelt, "TW002")):
        with pytest.raises(tw.UserError) as info:
            kernel[1, 3](out, device="cpu")
        assert info.value.diagnostics[0].code == code
