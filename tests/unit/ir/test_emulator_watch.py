"""The emulator's watch over kernels whose threads a person wrote: races told thread by thread, barriers, both sides of each."""

from __future__ import annotations

import textwrap

import numpy as np
import pytest

from tilewright.base.errors import UserError
from tilewright.ir.emulator import run_kernel
from tilewright.ir.text_parse import parse_kernel
from tilewright.ir.verify import verify_kernel


def run(body: str, threads: int = 64, grid: int = 1, x: np.ndarray | None = None, out: np.ndarray | None = None) -> np.ndarray:
    """Run a body with %t (thread), %b (block), %x and %out (i64), %s (shared, 128) and constants %c0, %c1 … %c64."""
    head = f'kernel @k stage=thread grid=[{grid}] threads={threads} {{block = [{threads}, 1, 1]}} {{\n'
    numbers = sorted({int(word[2:].rstrip(",")) for word in body.split() if word.startswith("%c") and word[2:].rstrip(",").isdigit()})
    head += "param %x: tensor<i64, [n], [1]> param %out: tensor<i64, [m], [1]> "
    head += "%t = thread_id : i64 %b = program_id {axis = 0} : i64 "
    head += " ".join(f"%c{n} = const {{value = {n}, dtype = i64}} : i64" for n in numbers)
    head += ' %s = alloc {space = "shared", shape = [128], dtype = i64} : tensor<i64, [128], [1], shared>\n'
    kernel = parse_kernel(head + textwrap.dedent(body).strip() + "\n}", "k.py")
    verify_kernel(kernel)
    x = np.arange(256) if x is None else x
    out = np.zeros(256, np.int64) if out is None else out
    run_kernel(kernel, [x, out], {"n": x.size, "m": out.size})
    return out


def message(body: str, **options: object) -> str:
    with pytest.raises(UserError) as error:
        run(body, **options)  # type: ignore[arg-type]
    return str(error.value).splitlines()[0]


STORE_AND_READ = """
    %o = mul %b, %c64 : i64
    %i = add %o, %t : i64
    store %s, %t, %i
    {sync}
    %n = xor %t, %c{step} : i64
    %v = load %s, %n : i64
    store %out, %i, %v
"""


def test_a_missing_barrier_names_both_threads_and_lines() -> None:
    assert message(STORE_AND_READ.format(sync="", step=32)) == (
        "k.py:8:1: error[TW050]: race on shared memory: load of 's'[32], which thread 32 stores at k.py:5:1 with nothing that "
        "orders the two, in block (0), thread 0"
    )


def test_threads_of_one_warp_race_too() -> None:
    assert "load of 's'[1], which thread 1 stores at k.py:5:1" in message(STORE_AND_READ.format(sync="", step=1))


@pytest.mark.parametrize(("sync", "step"), [("barrier", 1), ("barrier", 32), ("warp_sync", 1)])
def test_syncs_order(sync: str, step: int) -> None:
    result = run(STORE_AND_READ.format(sync=sync, step=step), grid=3)
    np.testing.assert_array_equal(result[:192], np.arange(192) ^ step)


def test_a_sync_of_the_warp_orders_no_other_warps() -> None:
    assert "which thread 32 stores" in message(STORE_AND_READ.format(sync="warp_sync", step=32))


def test_a_shuffle_orders_no_memory() -> None:
    assert "which thread 1 stores" in message(STORE_AND_READ.format(sync='%q = shuffle %t, %c1 {mode = "xor"} : i64', step=1))


def test_writing_after_others_have_read() -> None:
    text = message("""
        store %s, %t, %t
        barrier
        %v = load %s, %c1 : i64
        store %s, %t, %c64
    """)
    assert text.startswith("k.py:6:1: error[TW050]: race on shared memory: store of 's'[1], which thread ")
    assert "loads at k.py:5:1" in text and text.endswith("in block (0), thread 1")


def test_readers_of_several_warps_are_all_remembered() -> None:
    """A warp that syncs knows of its own readers, not of those of other warps."""
    text = message("""
        store %s, %t, %t
        barrier
        %v = load %s, %c1 : i64
        warp_sync
        %z = lt %t, %c1 : bool
        if %z {
        store %s, %c1, %c64
        yield
        } {
        yield
        }
    """)
    assert "store of 's'[1], which thread " in text and int(text.split("which thread ")[1].split()[0]) >= 32


def test_threads_that_write_one_place_at_once() -> None:
    assert message("store %s, %c0, %t") == (
        "k.py:3:1: error[TW050]: race on shared memory: store of 's'[0], which thread 0 stores by the same statement with nothing "
        "that orders the two, in block (0), thread 1"
    )
    run("store %s, %c0, %c64")


def test_blocks_that_write_one_place() -> None:
    body = """
        %z = lt %t, %c1 : bool
        if %z {
        store %out, %c0, %b
        yield
        } {
        yield
        }
    """
    run(body)
    assert message(body, grid=2).endswith("which block (0), thread 0 stores by the same statement with nothing that orders the two, in "
                                          "block (1), thread 0")  # fmt: skip


def test_blocks_are_watched_across_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.ir.emulator.warps.thread.LANES", 64)
    body = "%o = mul %b, %c1 : i64\n%i = add %o, %t : i64\nstore %out, %i, %b"
    assert "store of 'out'[1], which block (0), thread 1 stores by the same statement" in message(body, grid=2)


def test_atomics_do_not_race_with_atomics() -> None:
    body = '%o = atomic %out, %c0, %c1 {kind = "add", scope = "device"} : i64'
    assert run(body, grid=5)[0] == 320


def test_atomics_of_a_block_order_nothing_for_others() -> None:
    body = '%o = atomic %out, %c0, %c1 {kind = "add", scope = "block"} : i64'
    assert run(body)[0] == 64
    assert "atomic of 'out'[0], which block (0), thread" in message(body, grid=2)


COUNT = """
    %z = lt %t, %c1 : bool
    if %z {{
    store %s, %c0, %c0
    yield
    }} {{
    yield
    }}
    {first}
    %o = atomic %s, %c0, %c1 {{kind = "add", scope = "block"}} : i64
    {second}
    %v = load %s, %c0 : i64
    store %out, %t, %v
"""


def test_atomics_race_with_what_is_none() -> None:
    assert (run(COUNT.format(first="barrier", second="barrier"))[:64] == 64).all()
    assert "k.py:11:1: error[TW050]: race on shared memory: atomic of 's'[0], which thread 0 stores at k.py:5:1" in message(
        COUNT.format(first="", second="barrier")
    )
    assert "k.py:13:1: error[TW050]: race on shared memory: load of 's'[0], which thread " in (
        text := message(COUNT.format(first="barrier", second=""))
    )
    assert "updates at k.py:11:1" in text


LAST_BLOCK = """
    %z = eq %t, %c0 : bool
    if %z {{
    %i = add %b, %c1 : i64
    store %out, %i, %i
    {fence}
    %old = atomic %out, %c0, %c1 {{kind = "add", scope = "device"}} : i64
    %last = eq %old, %c3 : bool
    if %last {{
    %sum = for %c1, %c5, %c1, %c0 : i64 (%k: i64, %so: i64) {{
    %v = load %out, %k : i64
    %p = add %so, %v : i64
    yield %p
    }}
    store %out, %c64, %sum
    yield
    }} {{
    yield
    }}
    yield
    }} {{
    yield
    }}
"""


@pytest.mark.parametrize("lanes", [64, 1 << 18])
def test_the_last_block_reads_what_others_released(lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.ir.emulator.warps.thread.LANES", lanes)
    result = run(LAST_BLOCK.format(fence='fence {scope = "device"}'), grid=4)
    assert result[64] == 10
    text = message(LAST_BLOCK.format(fence=""), grid=4)
    assert "load of 'out'[1], which block (0), thread 0 stores at k.py:6:1" in text and text.endswith("in block (3), thread 0")


def test_arrays_that_overlap_are_one() -> None:
    memory = np.zeros(300, np.int64)
    body = """
        %i = mul %b, %c1 : i64
        %v = load %x, %t : i64
        store %out, %t, %c64
    """
    run(body, x=memory[:64], out=memory[64:128])
    assert "store of 'out'[0], which thread 1 loads at k.py:4:1" in message(body, x=memory[:64], out=memory[1:65])


def test_warps_at_different_barriers() -> None:
    body = """
        %z = lt %t, %c32 : bool
        if %z {
        barrier
        yield
        } {
        barrier
        yield
        }
    """
    text = message(body)
    assert text.startswith("k.py:") and "divergent barrier: warp " in text and "of block (0) waits here, warp " in text


def test_a_warp_that_ended_is_named() -> None:
    body = """
        %z = lt %t, %c32 : bool
        if %z {
        barrier
        yield
        } {
        yield
        }
    """
    assert message(body) == (
        "k.py:5:1: error[TW050]: deadlock in block (0): warp 0 waits at the barrier at k.py:5:1; warp 1 waits for other warps at "
        "the end of the `if` at k.py:4:1"
    )


HANDED_ON = """
    %z = eq %t, %c0 : bool
    if %z {{
    %first = eq %b, %c1 : bool
    if %first {{
    store %out, %c1, %c64
    {store}
    yield
    }} {{
    %one = while %c0 : i64 (%u: i64) {{
    %f = {load} : i64
    %w = eq %f, %c0 : bool
    yield %w, %f
    }} (%q: i64) {{
    yield %q
    }}
    %v = load %out, %c1 : i64
    store %out, %c2, %v
    yield
    }}
    yield
    }} {{
    yield
    }}
"""
PLAIN_LOAD = "load %out, %c0"
ATOMIC_LOAD = 'atomic_load %out, %c0 {order = "acquire", scope = "device"}'


@pytest.mark.parametrize("store", [
    'atomic_store %out, %c0, %c1 {order = "release", scope = "device"}',
    'fence {scope = "device"} atomic_store %out, %c0, %c1 {order = "volatile", scope = "device"}',
    '%y = atomic %out, %c0, %c1 {kind = "exchange", scope = "device", order = "acq_rel"} : i64',
])  # fmt: skip
def test_a_block_waits_for_a_flag_of_another(store: str) -> None:
    assert run(HANDED_ON.format(store=store, load=ATOMIC_LOAD), grid=2)[2] == 64


def test_a_flag_without_a_fence_orders_nothing() -> None:
    store = 'atomic_store %out, %c0, %c1 {order = "relaxed", scope = "device"}'
    text = message(HANDED_ON.format(store=store, load=ATOMIC_LOAD), grid=2)
    assert "load of 'out'[1], which block (1), thread 0 stores at k.py:7:1" in text


def test_a_flag_must_not_be_an_ordinary_element() -> None:
    store = 'fence {scope = "device"} atomic_store %out, %c0, %c1 {order = "relaxed", scope = "device"}'
    text = message(HANDED_ON.format(store=store, load=PLAIN_LOAD), grid=2)
    assert "race on global memory: atomic_store of 'out'[0], which block (0), thread 0 loads" in text


def test_the_help_for_narrow_atomics() -> None:
    body = '%o = atomic %out, %c0, %c1 {kind = "add", scope = "block"} : i64'
    with pytest.raises(UserError, match="help: atomics of scope 'block' hold for one block only: use scope 'device'"):
        run(body, grid=2)


def test_blocks_that_run_again_do_not_race_with_themselves() -> None:
    """Warps pass barriers in loops whose lengths differ between blocks: run together they hold one another up."""
    body = """
        %n = add %b, %c1 : i64
        %low = lt %t, %c32 : bool
        %half = mod %t, %c32 : i64
        %o = mul %b, %c64 : i64
        %i = add %o, %t : i64
        %j = xor %i, %c32 : i64
        for %c0, %n, %c1 (%k: i64) {
        store %out, %i, %k
        barrier
        %v = load %out, %j : i64
        barrier
        yield
        }
    """
    assert (run(body, grid=3)[:192] == np.repeat(np.arange(3), 64)).all()
