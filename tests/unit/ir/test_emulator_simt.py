"""The emulator on ops of explicit kernels: what they compute, against plain Python, and what it refuses."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable

import numpy as np
import pytest

from instruction_kernels import THREADS, Case, Maker, atomics, failing, instruction_cases, until, when
from tilewright.base.dtypes import DType, bf16, f16, f32, f64, i16, i32, i64, u32, u64
from tilewright.base.errors import CompilerBug, UserError
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Value
from tilewright.ir.printing import pieces, printf_format, written

CASES = {case.name: case for case in instruction_cases()}
RUNS: dict[str, dict[str, np.ndarray]] = {}


def run(name: str) -> dict[str, np.ndarray]:
    if name not in RUNS:
        RUNS[name] = CASES[name].emulate()
    return RUNS[name]


@pytest.mark.parametrize("name", CASES)
def test_every_case_runs(name: str) -> None:
    after = run(name)
    changed = [n for n, array in after.items() if array.tobytes() != CASES[name].arrays[n].tobytes()]
    assert changed, "a kernel that does nothing tests nothing"


# -- atomics ----------------------------------------------------------------------------------------------------------

STEPS: dict[str, Callable[[float, float, float], float]] = {
    "add": lambda old, v, e: old + v, "sub": lambda old, v, e: old - v, "min": lambda old, v, e: min(old, v), "max": lambda old, v, e: max(old, v),
    "and": lambda old, v, e: int(old) & int(v), "or": lambda old, v, e: int(old) | int(v), "xor": lambda old, v, e: int(old) ^ int(v),
    "exchange": lambda old, v, e: v, "cas": lambda old, v, e: v if old == e else old,
    "inc": lambda old, v, e: 0 if old >= v else old + 1, "dec": lambda old, v, e: v if old == 0 or old > v else old - 1,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [i32, u32, i64, u64, i16, f16, bf16, f32, f64], ids=str)
def test_atomics_one_by_one(dtype: DType) -> None:
    case, after = CASES[f"atomics_{dtype}"], run(f"atomics_{dtype}")
    before = case.arrays
    values = before["v"].astype(np.float64)
    with np.errstate(all="ignore"):
        for kind, step in STEPS.items():
            if f"own_{kind}" not in before:
                assert dtype.is_float
                continue
            start = before[f"own_{kind}"].astype(np.float64)
            expected = before["expected_cas"].astype(np.float64) if kind == "cas" else values
            wanted = [step(*x) for x in zip(start, values, expected, strict=True)]
            assert np.array_equal(after[f"own_{kind}"], np.asarray(wanted).astype(np.int64).astype(dtype.numpy)), kind
            assert np.array_equal(after[f"old_{kind}"], before[f"own_{kind}"]), kind
            if f"many_{kind}" in before:
                state = before[f"many_{kind}"].astype(np.float64)
                for number, value in enumerate(values):
                    place = number % THREADS % 4
                    state[place] = step(state[place], 4 if kind in ("inc", "dec") else value, 0)
                assert np.array_equal(after[f"many_{kind}"], state.astype(np.int64).astype(dtype.numpy)), kind


def test_least_and_greatest_of_floats_keep_nan_and_zeros_apart() -> None:
    after = run("atomic_nan_f32")
    v, starts = CASES["atomic_nan_f32"].arrays["v"], CASES["atomic_nan_f32"].arrays["t_min"]
    nan = np.isnan(v) | np.isnan(starts)
    for kind in ("min", "max"):
        assert np.array_equal(np.isnan(after[f"t_{kind}"]), nan)
    # 0 against -0, both ways round.
    assert np.signbit(after["t_min"][[3, 10]]).all()
    assert not np.signbit(after["t_max"][[3, 10]]).any()


def test_a_chain_of_blocks() -> None:
    assert run("message_1")["data"][::4].tolist() == [*range(101, 117), 0]
    assert run("message_2")["words"][::2].tolist() == [*range(101, 117), 0]


def test_neighbours_are_added() -> None:
    after = run("atomic_vectors")
    assert after["many_f32_4_relaxed"].tolist() == [0, 32, 0, 32] * 4
    own = CASES["atomic_vectors"].arrays["own_bf16_8_acq_rel"].astype(np.float32)
    assert np.array_equal(after["own_bf16_8_acq_rel"].astype(np.float32), own + np.tile([0, 1], own.size // 2))


def test_128_bits_are_compared_as_a_whole() -> None:
    after, before = run("atomic_wide_global"), CASES["atomic_wide_global"].arrays
    assert np.array_equal(after["old_u32"], before["t_u32"][3::4])
    assert after["first_u32"].tolist() == [3] * 128
    assert after["second_u32"].tolist() == [4] * 128
    assert after["t_u32"].tolist() == [1, 2, 3, 4] * 128


# -- warps ------------------------------------------------------------------------------------------------------------


def test_masked_votes_and_matches() -> None:
    after, before = run("masked"), CASES["masked"].arrays
    values, long = before["v"].astype(int), before["w"].astype(int)
    for number in range(128):
        base, lane = number // 32 * 32, number % 32
        group = [k for k in range(32) if (k % 3 < 1) == (lane % 3 < 1)]
        limit = 0 if lane % 3 < 1 else -3
        mine = [int(values[base + k]) for k in group]
        votes = [v > limit for v in mine]
        assert after["ballot"][number] == sum(1 << k for k, v in zip(group, votes, strict=True) if v)
        assert after["any"][number] == any(votes)
        assert after["all"][number] == all(votes)
        assert after["uniform"][number] == (len(set(votes)) == 1)
        assert after["match"][number] == sum(1 << k for k in group if values[base + k] == values[number])
        assert after["match_long"][number] == sum(1 << k for k in group if long[base + k] == long[number])
        assert after["match_all"][number] == sum(1 << k for k in group)
        assert after["same"][number]
        unsigned = [v & 0xFFFFFFFF for v in mine]
        assert after["redux_add"][number] == sum(mine)
        assert after["redux_min"][number] == min(mine)
        assert after["redux_max"][number] == max(mine)
        assert after["redux_and"][number] == np.bitwise_and.reduce(mine)
        assert after["redux_or"][number] == np.bitwise_or.reduce(mine)
        assert after["redux_xor"][number] == np.bitwise_xor.reduce(mine)
        assert after["unsigned"][number] == max(unsigned)
        assert after["shuffle"][number] == values[base + group[0]]


def test_lanes_know_who_they_are() -> None:
    after = run("lanes")
    lane = np.arange(192) % 96 % 32
    assert np.array_equal(after["lane"], lane)
    assert np.array_equal(after["warp"], np.arange(192) % 96 // 32)
    for name, relation in (
        ("lt", np.less),
        ("le", np.less_equal),
        ("eq", np.equal),
        ("ge", np.greater_equal),
        ("gt", np.greater),
    ):
        wanted = [sum(1 << k for k in range(32) if relation(k, own)) for own in lane]
        assert after[name].tolist() == wanted


@pytest.mark.parametrize("width", [1, 2, 4, 8, 16, 32])
def test_shuffles_stay_in_their_group(width: int) -> None:
    after = run("shuffles")
    for lane in range(32):
        low = lane // width * width
        inside = range(low, low + width)
        wanted = {"idx": low + 1 % width, "up": lane - 1, "down": lane + 1, "xor": lane ^ 1}
        for mode, source in wanted.items():
            reached = source in inside or (mode == "xor" and source < low)  # xor also reaches the groups below
            assert after[f"lane_{mode}_{width}"][lane] == (source if reached else lane), (mode, lane)


def test_barriers_that_count() -> None:
    after = run("counting_barriers")
    values = CASES["counting_barriers"].arrays["v"].reshape(3, 96)
    for limit in (-1, 5, 20):
        counts = (values > limit).sum(axis=1)
        assert np.array_equal(after[f"count_{limit}"], np.repeat(counts, 96))
        assert np.array_equal(after[f"and_{limit}"], np.repeat(counts == 96, 96))
        assert np.array_equal(after[f"or_{limit}"], np.repeat(counts > 0, 96))


# -- bits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64"])
def test_bits_one_by_one(name: str) -> None:
    after, before = run("bits"), CASES["bits"].arrays
    size = int(name[1:])
    for number, value in enumerate(before[f"v_{name}"]):
        text = f"{int(value) & ((1 << size) - 1):0{size}b}"
        assert after[f"popcount_{name}"][number] == text.count("1")
        assert after[f"clz_{name}"][number] == size - len(text.lstrip("0"))
        assert after[f"ctz_{name}"][number] == size - len(text.rstrip("0"))
        assert int(after[f"brev_{name}"][number]) & ((1 << size) - 1) == int(text[::-1], 2)
        if size >= 32:
            assert int(after[f"mul_high_{name}"][number]) == int(value) * int(before[f"w_{name}"][number]) >> size


def test_words_one_by_one() -> None:
    after, before = run("bits"), CASES["bits"].arrays
    for number, (a, b, c) in enumerate(zip(*(before[f"word{k}"].tolist() for k in range(3)), strict=True)):
        both = a | b << 32
        octets = []
        for k in range(4):
            nibble = c >> 4 * k & 15
            octet = both >> 8 * (nibble & 7) & 255
            octets.append((255 if octet & 128 else 0) if nibble & 8 else octet)
        assert after["byte_perm"][number] == int.from_bytes(bytes(octets), "little")
        assert after["funnel_left"][number] == (both << (c & 31)) >> 32 & 0xFFFFFFFF
        assert after["funnel_right"][number] == both >> (c & 31) & 0xFFFFFFFF
        for signs, name in (("ss", "dp4a_ss"), ("su", "dp4a_su"), ("us", "dp4a_us"), ("uu", "dp4a_uu")):
            parts = [
                np.asarray([word], np.uint32).view(np.int8 if sign == "s" else np.uint8).astype(int)
                for word, sign in zip((a, b), signs, strict=True)
            ]
            assert int(after[name][number]) & 0xFFFFFFFF == c + int((parts[0] * parts[1]).sum()) & 0xFFFFFFFF, name


# -- what is refused --------------------------------------------------------------------------------------------------


def divided(body: Callable[[Maker, Builder, Value], None]) -> Case:
    """A warp whose lower half alone runs the body, which gets the lane."""
    m = Maker("divided", threads=32, blocks=1)
    lane = m.b.op("lane_id")
    m.array("o", i32, np.zeros(32))
    when(m.b, m.b.op("lt", lane, m.b.const(16, i32)), lambda inner: body(m, inner, lane))
    return m.case()


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (0xFFFFFFFF, r"vote: the mask 0xffffffff names lanes that are not here \(16, 17, .*31\), in block \(0\), thread 0"),
        (0xFFFE, r"vote: the mask 0x0000fffe does not name the thread's own lane 0, in block \(0\), thread 0"),
    ],
)
def test_masks_must_name_those_who_come(mask: int, message: str) -> None:
    case = divided(lambda m, b, lane: b.multi("vote", b.const(True, _bool()), b.const(mask, u32), mode="any"))
    with pytest.raises(UserError, match=r"error\[TW050\]: " + message):
        case.emulate()


def test_masks_must_agree() -> None:
    def body(m: Maker, b: Builder, lane: Value) -> None:
        first = b.op("lt", lane, b.const(8, i32))
        b.multi("warp_sync", b.select(first, b.const(0xFFFF, u32), b.const(0xFF00, u32)))

    with pytest.raises(UserError, match=r"warp_sync: the mask 0x0000ffff differs from the mask of lanes it names \(8, .*15\)"):
        divided(body).emulate()


def test_a_shuffle_reads_lanes_of_the_mask_only() -> None:
    def body(m: Maker, b: Builder, lane: Value) -> None:
        mask = b.select(b.op("lt", lane, b.const(8, i32)), b.const(0xFF, u32), b.const(0xFF00, u32))
        b.multi("shuffle", lane, b.const(3, i32), mask, mode="idx")

    with pytest.raises(UserError, match=r"shuffle reads lane 3 of its warp, which is not in the mask, in block \(0\), thread 8"):
        divided(body).emulate()


def test_a_barrier_that_counts_meets_no_other() -> None:
    m = Maker("mixed", threads=64, blocks=1)
    m.array("o", i32, np.zeros(64))
    first = m.b.op("lt", m.thread, m.b.index(32))
    m.b.if_(first, lambda b: [*b.multi("barrier")], lambda b: [*b.multi("barrier_reduce", first, kind="and")][:0])
    with pytest.raises(UserError, match="barrier_reduce of 64 threads, to which 32 came: the others wait at another barrier"):
        m.case().emulate()


def test_waiting_for_what_nobody_writes_is_a_deadlock() -> None:
    m = Maker("stuck", threads=32, blocks=1)
    flags = m.array("flags", u32, np.zeros(1))
    until(m.b, lambda b: b.op("eq", b.op("atomic_load", flags, b.index(0)), b.const(1, u32)))
    with pytest.raises(UserError, match="deadlock in block"):
        m.case().emulate()


def test_atomic_accesses_stay_inside() -> None:
    m = Maker("outside", threads=32, blocks=1)
    t = m.array("t", u32, np.zeros(8))
    m.b.multi("atomic_store", t, m.thread, m.b.const(1, u32))
    with pytest.raises(
        UserError, match=r"atomic_store of 't' at \[8\] is out of bounds: index 8, extent 8, in block \(0\), thread 8"
    ):
        m.case().emulate()
    m = Maker("crooked", threads=32, blocks=1)
    t = m.array("t", u32, np.zeros(8))
    m.b.multi("atomic_load", t, m.b.index(1), width=2)
    with pytest.raises(UserError, match="atomic_load of 2 elements of 't' from element 1 on is misaligned"):
        m.case().emulate()


@pytest.mark.parametrize(
    ("operands", "attrs", "message"),
    [
        ([f32], {"kind": "and"}, "atomic and takes integers, got f32"),
        ([i32], {"kind": "nand"}, "kind must be add, sub, min"),
        ([i32], {"kind": "add", "scope": "thread"}, "scope must be block, cluster, device or system, got 'thread'"),
        ([i32], {"kind": "add", "order": "seq_cst"}, "order must be relaxed, acquire, release or acq_rel"),
        ([i32], {"kind": "cas"}, "takes 1 indices"),
    ],
)
def test_atomics_that_do_not_exist(operands: list[DType], attrs: dict[str, str], message: str) -> None:
    m = Maker("wrong")
    memory = m.array("t", operands[0], np.zeros(8))
    with pytest.raises(CompilerBug, match=message):
        m.b.multi("atomic", memory, m.b.index(0), *(m.b.const(1, d) for d in operands), **attrs)


# -- copies, clusters, caches -----------------------------------------------------------------------------------------


def test_bulk_copies_move_what_they_say() -> None:
    assert np.array_equal(run("bulk_copies")["o"], 2 * np.arange(2048, dtype=np.float32))


def bulk(offset: int = 0, start: int = 0, count: int = 16, wait: bool = True) -> Case:
    m = Maker("bulk", threads=32, blocks=1)
    b = m.b
    x, o = m.array("x", f32, np.arange(64)), m.array("o", f32, np.zeros(32))
    tile = b.op("alloc", dtype=f32, shape=(64,), space="shared", align=128)
    bars = b.op("alloc", dtype=u64, shape=(1,), space="shared")

    def go(inner: Builder) -> None:
        inner.multi("mbarrier_init", bars, inner.index(0), count=1)
        inner.multi("mbarrier_expect", bars, inner.index(0), bytes=4 * count)
        inner.multi("bulk_load", tile, inner.index(offset), x, inner.index(start), inner.index(count), bars, inner.index(0))
        if wait:
            inner.multi("mbarrier_wait", bars, inner.index(0), inner.const(0, u32))
        inner.multi("store", o, inner.index(0), inner.op("load", tile, inner.index(offset)))

    when(b, b.op("eq", m.thread, b.index(0)), go)
    return m.case()


def test_bulk_copies_that_are_wrong() -> None:
    assert bulk(offset=8, start=4).emulate()["o"][0] == 4
    for wrong, message in (
        ({"count": 15}, "bulk_load of 60 bytes, which is no multiple of 16"),
        ({"start": 2}, r"bulk_load between 'x' at \[2\] and element 0 of .*: both must lie at multiples of 16 bytes"),
        ({"offset": 2}, r"bulk_load between 'x' at \[0\] and element 2 of .*: both must lie at multiples of 16 bytes"),
        ({"start": 56}, "bulk_load of 16 elements between 'x' at .* is out of bounds"),
        ({"offset": 56}, "bulk_load of 16 elements between 'x' at .* is out of bounds"),
        ({"start": 64}, r"bulk_load of 'x' at \[64\] is out of bounds: extents \[64\]"),
        ({"wait": False}, "load of uninitialised shared memory: .* is still being copied by the bulk_load"),
    ):
        with pytest.raises(UserError, match=message):
            bulk(**wrong).emulate()  # type: ignore[arg-type]


def test_a_bulk_store_is_waited_for() -> None:
    m = Maker("bulk", threads=32, blocks=1)
    b = m.b
    o = m.array("o", f32, np.zeros(32))
    tile = b.op("alloc", dtype=f32, shape=(32,), space="shared", align=128)
    b.multi("store", tile, m.thread, b.cast(m.thread, f32))
    b.multi("fence_async")
    b.multi("barrier")
    when(
        b, b.op("eq", m.thread, b.index(0)), lambda inner: inner.multi("bulk_store", tile, b.index(0), o, b.index(0), b.index(32))
    )
    with pytest.raises(UserError, match="the kernel ends with a bulk_store that is in no group"):
        m.case().emulate()


def test_blocks_of_a_cluster_reach_each_other() -> None:
    after = run("clusters")
    numbers = np.arange(128).reshape(4, 32)
    swapped = numbers[[1, 0, 3, 2]]
    assert np.array_equal(after["inbox"], swapped.reshape(-1))
    assert np.array_equal(after["neighbour"], numbers.reshape(-1))
    assert after["counters"].tolist() == [2 * sum(range(1, 33)), 32, 63, 9] * 32


def test_hints_change_nothing() -> None:
    after = run("caches")
    for name, array in after.items():
        if name[:2] in ("o_", "s_"):
            assert np.array_equal(array, after["x_" + "_".join(name.split("_")[1:3])]), name
    assert np.array_equal(after["seen"], after["flags"])
    copied = run("copies_with_hints")
    first = np.arange(128) * 4
    for number in range(14):
        wanted = np.where(np.arange(128) % THREADS < 20, first, 0) if number % 2 else first
        assert np.array_equal(copied[f"o{number}"], wanted), number


@pytest.mark.parametrize("name", ["f8e4m3", "f8e5m2"])
def test_matrices_of_eight_bit_floats(name: str) -> None:
    from tilewright.base.dtypes import by_name

    before, after = CASES[f"mma_{name}"].arrays, run(f"mma_{name}")
    words = [before[f"w{k}"].view(by_name(name).numpy).astype(np.float32).reshape(32, 4) for k in range(6)]
    a, b = np.zeros((16, 32), np.float32), np.zeros((32, 8), np.float32)
    for lane in range(32):
        for k in range(4):
            a[lane // 4 + 8 * (k % 2), 16 * (k // 2) + 4 * (lane % 4) :][:4] = words[k][lane]
        for k in range(2):
            b[16 * k + 4 * (lane % 4) : 16 * k + 4 * (lane % 4) + 4, lane // 4] = words[4 + k][lane]
    product = a @ b
    for lane in range(32):
        for k in range(4):
            assert after[f"o{k}"][lane] == product[lane // 4 + 8 * (k // 2), 2 * (lane % 4) + k % 2] + k


# -- telling the host -------------------------------------------------------------------------------------------------


def test_prints_come_in_the_order_of_threads(capsys: pytest.CaptureFixture[str]) -> None:
    CASES["printing"].emulate()
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["100% {}"] * 2
    assert lines[2:6] == ["bool True of   0", "bool True of   1", "i8 0 of   0", "i8 1 of   1"]
    assert lines[-6:-2] == ["f32 0.5 of   0", "f32 1.5 of   1", "f64 0.5 of   0", "f64 1.5 of   1"]
    assert lines[-2:] == ["   0.500|+5.00e-01|fffffffb|0x00fa", "   1.500|+1.50e+00|fffffffb|0x00fa"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{} {}", "has more places than there are numbers"),
        ("", "has 0 places for 1 numbers"),
        ("{0}", "a place is {} or {:format}, got {0}"),
        ("{!r}", "a place is {} or {:format}, got {!r}"),
        ("{", "Single '{' encountered"),
        ("{:#o}", "i32 cannot be written as '#o'"),
        ("{:f}", "i32 cannot be written as 'f': sign, width, precision and one of dxXo"),
    ],
)
def test_prints_that_cannot_be(text: str, message: str) -> None:
    m = Maker("wrong")
    with pytest.raises(CompilerBug, match=re.escape(message)):
        m.b.multi("print", m.b.const(1, i32), text=text)


@pytest.mark.parametrize(
    ("spec", "dtype", "value", "wanted"),
    [
        ("", f32, 0.1, "0.1"), ("", f64, 1e20, "1e+20"), ("", f32, np.inf, "inf"), ("", f32, np.nan, "nan"), (".3e", f32, 1234.5, "1.234e+03"),
        ("<6d", i32, -7, "-7    "), (">+6", i32, 7, "    +7"), ("06", i64, -7, "-00007"), ("#x", u32, 0, "0"), ("#X", u32, 255, "0XFF"),
        ("x", i16, -1, "ffffffff"), ("x", i64, -1, "f" * 16), ("o", u32, 8, "10"), ("", u64, (1 << 64) - 1, str((1 << 64) - 1)),
    ],
)  # fmt: skip
def test_numbers_are_written_as_c_does(spec: str, dtype: DType, value: float, wanted: str) -> None:
    parts = pieces(f"<{{:{spec}}}>", [dtype])
    assert written(parts, [value]) == f"<{wanted}>"
    made = subprocess.run(["printf", printf_format(parts).replace("ll", ""), str(value)], capture_output=True, text=True, check=True).stdout
    if not (dtype is i16 and spec == "x"):  # the shell's has 64 bits
        assert made == f"<{wanted}>"


def test_a_failed_assertion_names_the_thread() -> None:
    with pytest.raises(UserError, match=r'error\[TW050\]: assertion failed: number != "71", in block \(1\), thread 7'):
        failing().emulate()


def _bool() -> DType:
    from tilewright.base.dtypes import bool_

    return bool_


def test_kinds_of_all_dtypes_are_there() -> None:
    """The table of cases covers each kind for each dtype it exists for."""
    assert {n for n in atomics(i32).arrays if n.startswith("own_")} == {f"own_{k}" for k in STEPS}
