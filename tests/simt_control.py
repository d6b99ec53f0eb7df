"""Explicit kernels whose threads go different ways: branches, loops, early ends, local arrays, functions."""

from __future__ import annotations

import numpy as np

import tilewright as tw
from simt_kernels import case, floats, ordered, wholes, zeros


@case(2, 64, floats(128), zeros(128))
def clipped(x, y):
    i = tw.gpu_thread_id()
    v = x[i]
    if v < -1.0:
        v = -1.0
    elif v > 1.0:
        v = 1.0
    y[i] = v


@case(2, 64, floats(128), zeros(128))
def ternary(x, y):
    i = tw.gpu_thread_id()
    y[i] = x[i] if x[i] > 0 else -x[i] * 0.1


@case(2, 64, floats(100), zeros(100))
def early_return(x, y):
    i = tw.gpu_thread_id()
    if i >= len(x):
        return
    if x[i] < 0:
        y[i] = -1.0
        return
    y[i] = x[i]


@case(2, 64, wholes(128, dtype=np.int32, low=0, high=40), zeros(128, dtype=np.int32))
def return_in_a_loop(x, y):
    i = tw.gpu_thread_id()
    for k in range(50):
        if k * 3 > x[i]:
            y[i] = k
            return
    y[i] = -1


@case(2, 32, wholes(64, dtype=np.int32, low=1, high=40), zeros(64, dtype=np.int32))
def collatz(x, y):
    i = tw.gpu_thread_id()
    n = x[i]
    steps = 0
    while n != 1:
        if n % 2 == 0:
            n = n // 2
        else:
            n = 3 * n + 1
        steps += 1
    y[i] = steps


@case(2, 32, wholes(64, dtype=np.int32, low=1, high=999), wholes(64, dtype=np.int32, low=1, high=999), zeros(64, dtype=np.int32))
def greatest_divisor(x, y, z):
    i = tw.gpu_thread_id()
    a = x[i]
    b = y[i]
    while b:
        a, b = b, a % b
    z[i] = a


@case(2, 32, wholes(64, dtype=np.uint32, low=0, high=1 << 31), zeros(64, dtype=np.int32))
def bits_set(x, y):
    i = tw.gpu_thread_id()
    v = x[i]
    count = 0
    while v != 0:
        v = v & (v - 1)
        count += 1
    y[i] = count


@case(2, 32, wholes(64, dtype=np.int32, low=0, high=20), zeros(64, dtype=np.int32))
def triangle_with_continue(n, y):
    i = tw.gpu_thread_id()
    total = 0
    for k in range(n[i]):
        if k % 3 == 1:
            continue
        total += k
    y[i] = total


@case(2, 32, wholes(64, dtype=np.int32, low=0, high=20), zeros(64, dtype=np.int32))
def first_above(x, y):
    i = tw.gpu_thread_id()
    found = -1
    for k in range(64):
        if x[k] > x[i]:
            found = k
            break
    y[i] = found


@case(2, 32, wholes(64, dtype=np.int32, low=2, high=200), zeros(64, dtype=np.bool_))
def is_prime(x, y):
    i = tw.gpu_thread_id()
    n = x[i]
    prime = True
    k = 2
    while k * k <= n:
        if n % k == 0:
            prime = False
            break
        k += 1
    y[i] = prime


@case(2, 32, wholes(64, dtype=np.int32, low=0, high=9), zeros(64, dtype=np.int32))
def nested_loops_with_breaks(x, y):
    i = tw.gpu_thread_id()
    total = 0
    for a in range(x[i]):
        for b in range(a, 8):
            if b > x[i]:
                break
            if (a + b) % 2:
                continue
            total += a * b
        if total > 60:
            break
    y[i] = total


@case(2, 32, floats(64, low=0.5, high=90), zeros(64))
def newton_root(x, y):
    i = tw.gpu_thread_id()
    guess = x[i] * 0.5
    for _ in range(12):
        guess = 0.5 * (guess + x[i] / guess)
    y[i] = guess


@case(2, 32, floats(64, low=1, high=90), zeros(64))
def newton_until_close(x, y):
    i = tw.gpu_thread_id()
    guess = x[i]
    while abs(guess * guess - x[i]) > 0.001 * x[i]:
        guess = 0.5 * (guess + x[i] / guess)
    y[i] = guess


@case(2, 32, floats(64, low=0, high=8), zeros(64))
def bisection(x, y):
    i = tw.gpu_thread_id()
    low = 0.0
    high = 10.0
    for _ in range(30):
        middle = 0.5 * (low + high)
        if middle * middle < x[i]:
            low = middle
        else:
            high = middle
    y[i] = low


@case(2, 32, ordered(50), wholes(64, low=-60, high=60), zeros(64, dtype=np.int32))
def binary_search(table, x, y):
    i = tw.gpu_thread_id()
    low = 0
    high = len(table)
    while low < high:
        middle = (low + high) // 2
        if table[middle] < x[i]:
            low = middle + 1
        else:
            high = middle
    y[i] = low


@case(2, 64, zeros(128, dtype=np.int32))
def fizz(y):
    i = tw.gpu_thread_id()
    if i % 15 == 0:
        y[i] = 15
    elif i % 5 == 0:
        y[i] = 5
    elif i % 3 == 0:
        y[i] = 3
    else:
        y[i] = 1


@case(2, 32, floats(64), floats(6), zeros(64))
def horner(x, coefficients, y):
    i = tw.gpu_thread_id()
    total = 0.0
    for k in range(len(coefficients)):
        total = total * x[i] + coefficients[len(coefficients) - 1 - k]
    y[i] = total


@case(2, 32, floats(64), zeros(64))
def unrolled(x, y):
    i = tw.gpu_thread_id()
    total = 0.0
    for k in tw.unrolled(range(5)):
        total += x[(i + k) % 64] * k
    y[i] = total


@case(2, 32, wholes(64, dtype=np.int32), zeros(64, dtype=np.int32))
def short_circuit(x, y):
    i = tw.gpu_thread_id()
    if (i > 0 and x[i - 1] > 0) or (i < 63 and x[i + 1] < 0):
        y[i] = 1
    else:
        y[i] = 2


@case(2, 32, wholes(64, dtype=np.int32), zeros(64, dtype=np.int32))
def chained_comparison(x, y):
    i = tw.gpu_thread_id()
    y[i] = 1 if -3 < x[i] <= 4 else 0


@case(2, 32, wholes(64, dtype=np.int32, low=0, high=12), zeros(64, dtype=np.int64))
def fibonacci(n, y):
    i = tw.gpu_thread_id()
    a, b = 0, 1
    for _ in range(n[i]):
        a, b = b, a + b
    y[i] = a


@case(2, 32, wholes(64, dtype=np.int32, low=0, high=9), zeros(64, dtype=np.int64))
def factorial(n, y):
    i = tw.gpu_thread_id()
    product = 1
    k = n[i]
    while True:
        if k <= 1:
            break
        product *= k
        k -= 1
    y[i] = product


@case(1, 48, wholes(48, dtype=np.int32), zeros(48, dtype=np.int32))
def only_some_loop(x, y):
    i = tw.thread.x
    total = 0
    if i % 4 == 1:
        for k in range(i):
            total += x[k]
    elif i % 4 == 2:
        k = i
        while k < 48:
            total -= x[k]
            k += 5
    y[i] = total


@case(2, 32, floats(64), zeros(64))
def value_kept_from_a_branch(x, y):
    i = tw.gpu_thread_id()
    best = -99.0
    where = -1
    for k in range(0, 64, 3):
        if x[k] > best and k != i:
            best = x[k]
            where = k
    y[i] = best + where


@case(2, 32, wholes(64, dtype=np.int32), zeros(64, dtype=np.int32))
def countdown(x, y):
    i = tw.gpu_thread_id()
    total = 0
    for k in range(10, 0, -2):
        total = total * 3 + k + x[i]
    y[i] = total


@case(1, 64, wholes(64, dtype=np.int32), zeros(64, dtype=np.int32))
def loop_over_a_tuple(x, y):
    i = tw.thread.x
    total = 0
    for step in (1, 2, 4, 8):
        total += x[(i + step) % 64] * step
    y[i] = total


# -- arrays of a thread -------------------------------------------------------------------------------------------


@case(2, 16, wholes(32, 7), zeros(32, 7))
def insertion_sort(x: tw.Array, y: tw.Array):
    i = tw.gpu_thread_id()
    a = tw.local(7, tw.f32)
    for k in range(7):
        a[k] = x[i, k]
    for k in range(1, 7):
        v = a[k]
        j = k - 1
        while j >= 0 and a[j] > v:
            a[j + 1] = a[j]
            j -= 1
        a[j + 1] = v
    for k in range(7):
        y[i, k] = a[k]


@case(2, 32, floats(64), zeros(64))
def window_in_local(x, y):
    i = tw.gpu_thread_id()
    w = tw.local(3, tw.f32)
    for k in range(3):
        w[k] = x[(i + k) % 64]
    y[i] = w[0] * 0.25 + w[1] * 0.5 + w[2] * 0.25


@case(1, 40, wholes(40, dtype=np.int32, low=0, high=8), zeros(40, dtype=np.int32))
def local_by_own_index(x, y):
    i = tw.thread.x
    a = tw.local(8, tw.i32)
    for k in range(8):
        a[k] = k * k
    a[x[i]] = -1
    total = 0
    for k in range(8):
        total += a[(k * 3 + i) % 8] * k
    y[i] = total


@case(1, 24, wholes(24, 3, 3), zeros(24))
def determinant(x: tw.Array, y: tw.GpuBuffer[tw.f32]):
    i = tw.thread.x
    m = tw.local((3, 3), tw.f32)
    for a in range(3):
        for b in range(3):
            m[a, b] = x[i, a, b]
    y[i] = (
        m[0, 0] * (m[1, 1] * m[2, 2] - m[1, 2] * m[2, 1])
        - m[0, 1] * (m[1, 0] * m[2, 2] - m[1, 2] * m[2, 0])
        + m[0, 2] * (m[1, 0] * m[2, 1] - m[1, 1] * m[2, 0])
    )


# -- functions ----------------------------------------------------------------------------------------------------

FACTOR = 3
LIMITS = (-2.0, 2.5)


def _clip(v, low, high):
    return min(max(v, low), high)


def _polynomial(v):
    if v < 0:
        return v * v
    return v * v * v


def _both(a, b):
    return a + b, a - b


@case(2, 32, floats(64), zeros(64))
def calls_a_function(x, y):
    i = tw.gpu_thread_id()
    y[i] = _clip(x[i], LIMITS[0], LIMITS[1]) * FACTOR


@case(2, 32, floats(64), zeros(64))
def function_with_two_returns(x, y):
    i = tw.gpu_thread_id()
    y[i] = _polynomial(x[i]) + _polynomial(-x[i])


@case(2, 32, wholes(64), wholes(64), zeros(64))
def function_of_a_tuple(x, y, z):
    i = tw.gpu_thread_id()
    s, d = _both(x[i], y[i])
    z[i] = s * d


@case(2, 32, floats(64), zeros(64))
def nested_function(x, y):
    i = tw.gpu_thread_id()

    def shifted(k):
        return x[(i + k) % 64]

    y[i] = shifted(1) - shifted(2)


@case(2, 32, wholes(64, dtype=np.uint32, low=1, high=1 << 31), zeros(64, dtype=np.uint32))
def xorshift(seed, y):
    i = tw.gpu_thread_id()
    v = seed[i]
    for _ in range(20):
        v ^= v << 13
        v ^= v >> 17
        v ^= v << 5
    y[i] = v


@case(2, 32, wholes(64, dtype=np.uint64, low=1, high=1 << 60), zeros(64, dtype=np.float64))
def random_numbers(seed, y):
    i = tw.gpu_thread_id()
    state = seed[i]
    total = 0.0
    for _ in range(10):
        state = state * 6364136223846793005 + 1442695040888963407
        total += tw.f64(state >> 40) * 0.5
    y[i] = total


@case(2, 32, wholes(64, dtype=np.int32, low=-3, high=4), zeros(64, dtype=np.int32))
def state_machine(x, y):
    i = tw.gpu_thread_id()
    state = 0
    for k in range(12):
        v = x[(i + k) % 64]
        if state == 0:
            if v > 0:
                state = 1
        elif state == 1:
            if v < 0:
                state = 2
            elif v == 0:
                state = 0
        else:
            if v == 3:
                break
    y[i] = state


@case(1, 32, wholes(32, dtype=np.int32, low=0, high=30), zeros(32, dtype=np.int32))
def while_with_two_exits(x, y):
    i = tw.thread.x
    n = x[i]
    turns = 0
    while n < 100:
        turns += 1
        n = n * 2 + 1
        if n % 7 == 0:
            turns += 1000
            break
        if turns > 5:
            n = 500
    y[i] = turns


@case(2, 32, floats(64), zeros(64))
def loop_that_no_thread_enters(x, y):
    i = tw.gpu_thread_id()
    total = x[i]
    for k in range(5, 5):
        total += k
    while total > 100.0:
        total -= 1.0
    y[i] = total


@case(2, 16, floats(32, 8), zeros(32))
def softmax_of_a_row(x: tw.Array, y: tw.GpuBuffer[tw.f32]):
    i = tw.gpu_thread_id()
    largest = x[i, 0]
    for k in range(1, 8):
        largest = max(largest, x[i, k])
    total = 0.0
    for k in range(8):
        total += x[i, k] - largest
    y[i] = total


@case(2, 32, wholes(64, dtype=np.int32, low=-20, high=20), zeros(64, dtype=np.int32))
def divergent_inside_uniform(x, y):
    i = tw.gpu_thread_id()
    total = 0
    for k in range(6):
        v = x[(i * 5 + k) % 64]
        while v > 3:
            total += v
            v -= k + 1
        if total > 200:
            total -= 100
    y[i] = total
