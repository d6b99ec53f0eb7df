"""Proofs, latencies, rings and C interfaces of critical functions."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import tilewright as tw
from tilewright.base.target import host_cpu, parse_target
from tilewright.codegen.critical.c_function import c_function_text
from tilewright.compile import critical_proof
from tilewright.compile.critical_export import export_critical


class Order(tw.State):
    id: int
    price: float
    when: int


class Desk(tw.State):
    position: int
    limit: int = 100
    sent: int

    def room(self) -> int:
        return self.limit - abs(self.position)


Orders = tw.Ring[Order, 4]
Numbers = tw.Ring[tw.i32, 8]


@tw.no_allocation
@tw.no_syscalls
@tw.critical(max_latency_ns=10_000_000)
def submit(desk: Desk, orders: Orders, quantity: int, price: float) -> int:
    if abs(quantity) > desk.room():
        return -2
    slot = orders.claim()
    if slot < 0:
        return -1
    order = orders.items[slot]
    order.id = desk.sent
    order.price = price
    order.when = tw.clock()
    orders.publish()
    desk.position += quantity
    desk.sent += 1
    return slot


@tw.critical
def squares(ring: Numbers, n: int) -> int:
    done = 0
    for i in range(n):
        if ring.push(i * i):
            done += 1
    return done


@tw.critical
def drain(ring: Numbers) -> int:
    total = 0
    while True:
        slot = ring.front()
        if slot < 0:
            break
        total += ring.items[slot]
        ring.release()
    return total


@tw.critical
def counted(counts: tw.i64[2], n: int) -> None:
    for _ in range(n):
        tw.atomic_add(counts, 0, 1)


@tw.critical
def backwards(x: tw.f64[64]) -> float:
    own = tw.local(64, tw.f64)
    for i in range(64):
        own[63 - i] = x[i]
    found = 0.0
    for i in range(64):
        found = found * 0.5 + own[i]
    return found


@tw.critical
def plus(a: tw.i32, b: bool) -> tw.i32:
    return tw.i32(a) + (tw.i32(1) if b else tw.i32(2))


def test_rings() -> None:
    desk, orders = Desk(limit=1000), Orders()
    assert [submit(desk, orders, 10, 1.5 * k) for k in range(5)] == [0, 1, 2, 3, -1]
    assert (desk.position, desk.sent, len(orders)) == (40, 4, 4)
    assert submit(desk, orders, 2000, 1.0) == -2
    found = [orders.pop() for _ in range(5)]
    assert [o.price for o in found[:4]] == [0.0, 1.5, 3.0, 4.5]
    assert found[4] is None
    assert found[1].when <= found[2].when
    assert orders.push(Order(id=7, price=2.0))
    assert orders.pop().id == 7
    with pytest.raises(tw.UserError, match="does not hold a Desk"):
        orders.push(Desk())
    assert submit(desk, orders, 1, 1.0) == 1  # slots go round
    numbers = Numbers()
    assert squares(numbers, 20) == 8
    assert not numbers.push(3)
    assert drain(numbers) == sum(i * i for i in range(8))
    assert len(numbers) == 0
    for wrong, words in (((tw.i64, 3), "power of two"), ((str, 4), "numbers or states"), (tw.i64, "takes what it holds")):
        with pytest.raises(tw.UserError, match=words):
            tw.Ring[wrong]


def test_a_ring_between_threads() -> None:
    ring, found, count = tw.Ring[tw.i64, 16](), [], 3000

    def produce() -> None:
        for i in range(count):
            while not ring.push(i):
                time.sleep(0)

    thread = threading.Thread(target=produce)
    thread.start()
    while len(found) < count:
        value = ring.pop()
        if value is not None:
            found.append(value)
    thread.join()
    assert found == list(range(count))


def test_atomics() -> None:
    counts = np.zeros(2, np.int64)
    counted.compile()
    threads = [threading.Thread(target=counted, args=(counts, 1000)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts.tolist() == [4000, 0]


def test_latency(tmp_path: Path) -> None:
    desk = Desk(limit=1 << 40)
    found = tw.latency(submit, (desk, Orders(), 1, 1.0), n=2000)
    assert (desk.position, desk.sent) == (0, 0)
    assert found.within
    assert found.native.least <= found.native.p50 <= found.native.p99 <= found.native.p99_9 <= found.native.p99_99 <= found.native.most
    assert found.python is not None
    assert found.python.p50 > found.native.p50
    assert sum(n for _, _, n in found.native.buckets()) == len(found.native.times)
    assert found.native.batch == 1 or "percentiles are of batches" in str(found)
    assert "within the budget" in str(found)
    assert "<polyline" in found.plot(tmp_path / "submit.svg").read_text()
    failing = tw.latency(counted, (np.zeros(2, np.int64), 1), n=100, python=False)
    assert failing.faults == 0
    assert failing.python is None
    assert failing.within is None
    with pytest.raises(tw.DeviceError, match="no core 100000"):
        tw.latency(submit, (desk, Orders(), 1, 1.0), cpu=100000)
    for arguments, words in (((lambda: 0, ()), "takes a critical function"), ((submit, (), 0), "n is 0"), ((submit, ()), "missing 'desk'")):
        with pytest.raises(tw.UserError, match=words):
            tw.latency(*arguments)  # type: ignore[arg-type]


def test_short_calls_are_timed_in_batches() -> None:
    """Below ten steps of the counter one call cannot be told from another: percentiles are of batches then, and the table says so."""

    @tw.critical
    def short(a: int) -> int:
        return a + 1

    @tw.critical
    def long(a: int) -> int:
        total = a
        for i in range(20_000):
            total = (total * 31 + i) % 1_000_003
        return total

    quick, slow = tw.latency(short, (1,), n=20_000, python=False), tw.latency(long, (1,), n=40, python=False)
    assert quick.native.batch > 1 and slow.native.batch == 1
    assert quick.native.batch * 20 >= 10 * quick.resolution_ns  # a call of this kind takes less than 20 ns
    assert slow.native.p50 > 10 * slow.resolution_ns
    assert "percentiles are of batches" in str(quick) and "percentiles are of batches" not in str(slow)
    assert len(slow.native.times) == slow.calls and len(quick.native.times) * quick.native.batch == quick.calls


def test_a_temporary_array_lies_on_the_stack() -> None:
    @tw.no_allocation
    @tw.no_syscalls
    @tw.critical
    def summed(a: int) -> int:
        total = 0
        for turn in range(3):
            table = tw.zeros((4, 8), tw.i64)  # zeros again in each turn
            ones = tw.ones(5)
            rest = tw.empty(shape=2, dtype=tw.f32)
            rest[1] = 1.5
            for i in range(4):
                table[i, turn] += a
                total += table[i, turn]
            total += int(ones[4] + rest[1])
        return total

    assert summed(10) == 3 * (40 + 2)
    proof = summed.proof()
    assert proof.no_allocation and proof.stack_bytes is not None and proof.stack_bytes >= 4 * 8 * 8

    @tw.critical
    def computed(a: int) -> int:
        return int(tw.zeros((a,), tw.f64)[0])

    with pytest.raises(tw.UserError, match=r"the size of tilewright.zeros is computed, and a critical function allocates nothing") as caught:
        computed(3)
    assert "test_critical_proof.py:" in str(caught.value)


def test_levels_of_critical_functions() -> None:
    def work(a: int) -> int:
        total = 0
        for i in range(8):
            total += i * a
        return total

    sizes = {}
    for level in ("O0", "O1", "O2", "O3", "Os", "Olatency"):
        made = tw.no_syscalls(tw.critical(optimize=level)(work))
        assert made(3) == 84
        sizes[level] = made.proof().code_bytes
    assert sizes["O0"] > sizes["O2"] and sizes["Os"] <= sizes["O3"]
    with pytest.raises(tw.UserError, match="optimize is 'tiered'"):
        tw.critical(optimize="tiered")


def test_numbers_that_are_known_fault_where_they_are_reached() -> None:
    @tw.critical
    def divided(a: int) -> int:
        zero = 0
        if a > 3:
            return 7 // zero
        if a < -3:
            return (1 << 62) * 4
        if a == 2:
            return 1 << -zero - 1
        return a

    assert divided(1) == 1
    for value, kind in ((4, ZeroDivisionError), (-4, OverflowError), (2, ValueError)):
        with pytest.raises(kind):
            divided(value)

    @tw.critical
    def infinite(a: float) -> float:
        return -1.0 / 0.0

    assert infinite(1.0) == -float("inf")


def test_faults_are_counted() -> None:
    @tw.critical
    def fails(a: int) -> int:
        return 1 // a

    found = tw.latency(fails, (0,), n=100)
    assert found.faults == found.calls
    assert found.python is None
    assert "ended with a fault" in str(found)


def test_proofs_are_read_off_the_object(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("capstone")
    proof = submit.compile().proof()
    assert (proof.no_allocation, proof.no_syscalls, proof.calls, proof.loops) == (True, True, (), 0)
    assert proof.loads >= 5
    assert proof.stores >= 5
    assert 0 < proof.path <= proof.instructions
    assert proof.branches >= 3
    assert "proved: no instruction leaves the function" in str(proof)
    assert any("PyObject" in name for name in proof.entry_calls)
    other = backwards.proof()
    assert other.loops == 2
    assert other.stack_bytes is not None
    assert 512 <= other.stack_bytes <= 1024

    def spoilt(*arguments: object) -> str:
        text = c_function_text(*arguments)  # type: ignore[arg-type]
        return "declare ptr @allocator(i64)\n" + text.replace("  %result = alloca i64, align 8", "  %spoilt = call ptr @allocator(i64 64)\n  %result = alloca i64, align 8")

    monkeypatch.setattr(critical_proof, "c_function_text", spoilt)

    @tw.no_allocation
    def allocates(desk: Desk) -> int:
        desk.sent += 1
        return desk.sent

    with pytest.raises(tw.UserError, match=r"is marked @tw.no_allocation, which cannot be proved: it calls allocator") as raised:
        allocates.compile()
    assert "test_critical_proof.py" in str(raised.value)


@tw.critical
def fused(a: float, b: float, c: float) -> float:
    return tw.fma(a, b, c)


def test_a_call_that_the_target_needs_is_refused_at_its_line() -> None:
    """A CPU without fused products calls the C library for them."""
    pytest.importorskip("capstone")
    assert critical_proof.prove("fused", fused.compiled, parse_target("x86-64-avx2")).no_allocation
    proof = critical_proof.prove("fused", fused.compiled, parse_target("x86-64"))
    assert (proof.calls, proof.no_allocation, proof.no_syscalls) == (("fma",), False, False)
    error = critical_proof.refusal("fused", fused.compiled, proof, "no_allocation")
    assert "'fma' becomes a call of fma, which leaves the compiled code" in str(error)
    assert "return tw.fma(a, b, c)" in str(error)


def test_a_system_call_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("capstone")
    asks = "svc #0" if host_cpu().triple.startswith("aarch64") else "syscall"

    def spoilt(*arguments: object) -> str:
        return c_function_text(*arguments).replace("  %result = alloca", f'  call void asm sideeffect "{asks}", ""()\n  %result = alloca')  # type: ignore[arg-type]

    monkeypatch.setattr(critical_proof, "c_function_text", spoilt)

    @tw.no_syscalls
    @tw.critical
    def asks_the_system(desk: Desk) -> int:
        return desk.sent

    with pytest.raises(tw.UserError, match=r"cannot be proved: it has (svc|syscall)"):
        asks_the_system.compile()


def test_marks() -> None:
    assert submit.constraints.no_allocation
    assert submit.constraints.no_syscalls
    assert submit.constraints.target_latency_ns == 10_000_000
    with pytest.raises(tw.UserError, match="no_allocation was given a int"):
        tw.no_allocation(3)  # type: ignore[arg-type]
    with pytest.raises(tw.UserError, match=r"tw.critical was given a int"):
        tw.critical(3)  # type: ignore[call-overload]


def test_c(tmp_path: Path) -> None:
    paths = {path.name for path in tw.export(submit, folder=tmp_path)} | {path.name for path in tw.export(plus, folder=tmp_path)}
    assert {"submit.o", "submit.h", "plus.o", "plus.h"} <= paths
    header = (tmp_path / "submit.h").read_text()
    assert "int64_t submit(Desk *desk, Ring_Order_4 *orders, int64_t quantity, double price, int64_t *result);" in header
    assert "IndexError: index a is outside 'orders.items'" in header
    assert "int32_t plus(int32_t a, bool b);" in (tmp_path / "plus.h").read_text()
    with pytest.raises(tw.UserError, match="its annotations say all"):
        tw.export(submit, 3, folder=tmp_path)
    with pytest.raises(tw.TargetLimit, match="critical functions are code of CPUs"):
        tw.export(submit, target="sm_90a", folder=tmp_path)
    assert export_critical(submit.built, parse_target("x86-64-avx2"), "other")["other.o"][18] == 62
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    (tmp_path / "main.c").write_text(
        '#include <stdio.h>\n#include "submit.h"\n#include "plus.h"\nstatic Desk desk = {.limit = 50};\nstatic Ring_Order_4 orders;\nint main(void) {\n'
        '    for (int k = 0; k < 3; k++) {\n        int64_t slot = 99, code = submit(&desk, &orders, 30, 2.5, &slot);\n'
        '        printf("%d %d %d\\n", (int)code, (int)slot, (int)desk.position);\n    }\n    printf("%g %d %d\\n", orders.items[0].price, plus(5, true), plus(-7, false));\n    return 0;\n}\n'
    )
    subprocess.run([compiler, "main.c", "submit.o", "plus.o", "-o", "main"], cwd=tmp_path, check=True)
    done = subprocess.run([str(tmp_path / "main")], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["0 0 30", "0 -2 30", "0 -2 30", "2.5 6 -5"]
