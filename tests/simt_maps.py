"""Explicit kernels without control flow to speak of: index forms, dtypes, integer arithmetic, functions."""

from __future__ import annotations

from types import FunctionType

import numpy as np

import tilewright as tw
from simt_kernels import case, floats, permutation, wholes, zeros

# -- forms of indices ---------------------------------------------------------------------------------------------


@case(4, 64, 2.5, floats(250), zeros(250))
def scale(a: tw.f32, x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    i = tw.gpu_thread_id()
    if i < len(x):
        y[i] = a * x[i]


@case(4, 64, floats(256), zeros(256))
def spelled_index(x, y):
    i = tw.block.x * tw.block.size.x + tw.thread.x
    y[i] = x[i] + 1.0


@case(2, 48, floats(96), zeros(96))
def block_of_48(x, y):
    i = tw.gpu_thread_id()
    y[i] = x[i] * x[i]


@case(3, 33, floats(99), zeros(99))
def block_of_33(x, y):
    i = tw.gpu_thread_id()
    y[i] = x[i] - 2.0


@case(5, 1, floats(5), zeros(5))
def single_threads(x, y):
    y[tw.block.x] = x[tw.block.x] * 3.0


@case(1, 1024, wholes(1024), zeros(1024))
def largest_block(x, y):
    y[tw.thread.x] = x[tw.thread.x] + tw.thread.x


@case((3, 2), (16, 4), floats(8, 48), zeros(8, 48))
def two_axes(x: tw.Array, y: tw.Array):
    j = tw.block.x * tw.block.size.x + tw.thread.x
    i = tw.block.y * tw.block.size.y + tw.thread.y
    y[i, j] = 2.0 * x[i, j]


@case((2, 2), (8, 8), floats(13, 15), zeros(13, 15))
def two_axes_guarded(x: tw.Array, y: tw.Array):
    j = tw.block.x * tw.block.size.x + tw.thread.x
    i = tw.block.y * tw.block.size.y + tw.thread.y
    if i < x.shape[0] and j < x.shape[1]:
        y[i, j] = x[i, j] + i - j


@case((2, 2, 2), (4, 4, 4), floats(8, 8, 8), zeros(8, 8, 8))
def three_axes(x: tw.Array, y: tw.Array):
    i = tw.block.z * tw.block.size.z + tw.thread.z
    j = tw.block.y * tw.block.size.y + tw.thread.y
    k = tw.block.x * tw.block.size.x + tw.thread.x
    y[i, j, k] = x[i, j, k] - x[k, j, i]


@case((1, 3, 2), (5, 3, 2), zeros(4, 9, 5, dtype=np.int32))
def odd_block_of_three_axes(y: tw.Array):
    i = tw.block.z * 2 + tw.thread.z
    j = tw.block.y * 3 + tw.thread.y
    y[i, j, tw.thread.x] = 100 * i + 10 * j + tw.thread.x


@case(4, 32, floats(128), zeros(128))
def reversed_index(x, y):
    i = tw.gpu_thread_id()
    y[len(x) - 1 - i] = x[i]


@case(2, 32, floats(128), zeros(64))
def every_second(x, y):
    i = tw.gpu_thread_id()
    y[i] = x[2 * i] - x[2 * i + 1]


@case(2, 32, floats(64), zeros(192))
def three_apart(x, y):
    i = tw.gpu_thread_id()
    y[3 * i + 1] = x[i]


@case(4, 32, floats(20), zeros(128))
def wrapped(x, y):
    i = tw.gpu_thread_id()
    y[i] = x[i % len(x)]


@case(4, 32, floats(10, 13), zeros(130))
def row_and_column_of_a_number(x: tw.Array, y: tw.GpuBuffer[tw.f32]):
    i = tw.gpu_thread_id()
    if i < len(y):
        y[i] = x[i // 13, i % 13]


@case(3, 32, floats(1000), zeros(1000))
def grid_stride(x, y):
    i = tw.gpu_thread_id()
    step = tw.block.size.x * 3
    while i < len(x):
        y[i] = x[i] * 0.5
        i += step


@case(3, 32, floats(1000), zeros(1000))
def grid_stride_for(x, y):
    for i in range(tw.gpu_thread_id(), len(x), 96):
        y[i] = x[i] + 0.25


@case(2, 32, floats(256), zeros(256))
def four_in_a_row(x, y):
    first = tw.gpu_thread_id() * 4
    for k in range(4):
        y[first + k] = x[first + k] * k


@case(2, 32, floats(256), zeros(256))
def four_apart(x, y):
    first = tw.block.x * 128 + tw.thread.x
    for k in range(4):
        y[first + k * 32] = x[first + k * 32] + k


@case(3, 32, floats(96), permutation(96), zeros(96))
def gathered(x, places, y):
    i = tw.gpu_thread_id()
    y[i] = x[places[i]]


@case(3, 32, floats(96), permutation(96, np.int64), zeros(96))
def scattered(x, places, y):
    i = tw.gpu_thread_id()
    y[places[i]] = x[i]


@case(2, 32, floats(64, 20), zeros(64))
def row_sums(x: tw.Array, y: tw.GpuBuffer[tw.f32]):
    i = tw.gpu_thread_id()
    total = 0.0
    for k in range(x.shape[1]):
        total += x[i, k]
    y[i] = total


@case(2, 32, floats(20, 64), zeros(64))
def column_sums(x: tw.Array, y: tw.GpuBuffer[tw.f32]):
    j = tw.gpu_thread_id()
    total = 0.0
    for k in range(x.shape[0]):
        total += x[k, j]
    y[j] = total


@case(2, 32, lambda rng: rng.normal(size=(64, 6)).astype(np.float32)[:, ::2], zeros(64, 3))
def strided_argument(x: tw.Array, y: tw.Array):
    i = tw.gpu_thread_id()
    for k in range(3):
        y[i, k] = x[i, k] * 2.0


@case(2, 32, lambda rng: rng.normal(size=(5, 64)).astype(np.float32).T, zeros(64, 5))
def transposed_argument(x: tw.Array, y: tw.Array):
    i = tw.gpu_thread_id()
    for k in range(5):
        y[i, k] = x[i, k] + k


@case(2, 64, floats(128))
def in_place(x):
    i = tw.gpu_thread_id()
    x[i] = x[i] * x[i]


@case(1, 32, floats(1), zeros(32))
def one_for_all(x, y):
    y[tw.thread.x] = x[0] + tw.thread.x


@case(2, 32, floats(64), zeros(64), True, 3, 0.5)
def numbers_of_every_kind(x, y, flag: tw.bool_, n: tw.i32, a: tw.f64):
    i = tw.gpu_thread_id()
    y[i] = x[i] * tw.f32(n) + tw.f32(a) if flag else x[i]


# -- dtypes -------------------------------------------------------------------------------------------------------


def _dtype(dtype: type) -> None:
    @case(2, 32, wholes(64, dtype=dtype, low=0, high=50), wholes(64, dtype=dtype, low=1, high=20), zeros(64, dtype=dtype), name=f"sum_and_product_{dtype.__name__}")
    def arithmetic(x, y, z):
        i = tw.gpu_thread_id()
        z[i] = x[i] * y[i] + x[i] - y[i]

    @case(2, 32, wholes(64, dtype=dtype, low=0, high=9), wholes(64, dtype=dtype, low=0, high=9), zeros(64, dtype=dtype), name=f"larger_{dtype.__name__}")
    def larger(x, y, z):
        i = tw.gpu_thread_id()
        if x[i] > y[i]:
            z[i] = x[i]
        elif x[i] == y[i]:
            z[i] = 0
        else:
            z[i] = max(x[i], y[i])


for _kind in (np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64, np.float16, np.float32, np.float64):
    _dtype(_kind)


@case(2, 32, lambda rng: rng.random(64) < 0.5, lambda rng: rng.random(64) < 0.5, lambda rng: np.zeros(64, np.bool_))
def bools(x, y, z):
    i = tw.gpu_thread_id()
    z[i] = (x[i] and not y[i]) or (y[i] and not x[i])


@case(2, 32, floats(64, low=-300, high=300), zeros(64, dtype=np.int8), zeros(64, dtype=np.uint8), zeros(64, dtype=np.int32))
def floats_to_integers(x, a, b, c):
    i = tw.gpu_thread_id()
    a[i] = tw.i8(x[i])
    b[i] = tw.u8(x[i])
    c[i] = tw.i32(x[i])


@case(2, 32, wholes(64, dtype=np.int64, low=-(2**40), high=2**40), zeros(64), zeros(64, dtype=np.int32), zeros(64, dtype=np.uint16))
def wide_integers_to_narrow(x, a, b, c):
    i = tw.gpu_thread_id()
    a[i] = tw.f32(x[i])
    b[i] = tw.i32(x[i])
    c[i] = tw.u16(x[i])


@case(2, 32, floats(64), zeros(64, dtype=np.uint32))
def bits_of_floats(x, y):
    i = tw.gpu_thread_id()
    y[i] = tw.bitcast(x[i], tw.u32) ^ tw.u32(1)


@case(2, 32, floats(64), floats(64, dtype=np.float64), zeros(64, dtype=np.float64))
def mixed_floats(x, y, z):
    i = tw.gpu_thread_id()
    z[i] = x[i] * y[i]


# -- integers -----------------------------------------------------------------------------------------------------


def _integers(name: str, function: FunctionType) -> None:
    @case(2, 32, wholes(64, dtype=np.int32, low=-99, high=100), wholes(64, dtype=np.int32, low=1, high=12), zeros(64, dtype=np.int32), name=f"integers_{name}")
    def kernel(x, y, z):
        i = tw.gpu_thread_id()
        z[i] = function(x[i], y[i])

    @case(2, 32, wholes(64, dtype=np.uint64, low=0, high=1 << 60), wholes(64, dtype=np.uint64, low=1, high=12), zeros(64, dtype=np.uint64), name=f"unsigned_{name}")
    def unsigned(x, y, z):
        i = tw.gpu_thread_id()
        z[i] = function(x[i], y[i])


def _floor_divide(a, b):
    return a // b


def _remainder(a, b):
    return a % b


def _shift(a, b):
    return (a << b) ^ (a >> b)


def _masks(a, b):
    return (a & ~b) | (b ^ a)


def _extremes(a, b):
    return min(a, b) * max(a, b)


def _middle(a, b):
    return (a & b) + ((a ^ b) >> 1)


for _function in (_floor_divide, _remainder, _shift, _masks, _extremes, _middle):
    _integers(_function.__name__[1:], _function)


@case(2, 32, wholes(64, dtype=np.int32, low=-9, high=10), wholes(64, dtype=np.int32, low=-2, high=3), zeros(64, dtype=np.int32), zeros(64, dtype=np.int32))
def division_by_zero_gives_zero(x, y, quotient, rest):
    i = tw.gpu_thread_id()
    quotient[i] = x[i] // y[i]
    rest[i] = x[i] % y[i]


@case(2, 32, wholes(64, dtype=np.int32, low=-99, high=100), wholes(64, dtype=np.int32, low=1, high=12), zeros(64))
def true_division(x, y, z):
    i = tw.gpu_thread_id()
    z[i] = x[i] / y[i]


# -- functions ----------------------------------------------------------------------------------------------------


def _math(name: str, low: float, high: float, dtype: type) -> None:
    function = getattr(tw, name)
    bound = 0.0 if name in ("sqrt", "floor", "ceil", "round", "trunc", "abs") else 4.0

    @case(2, 64, floats(128, low=low, high=high, dtype=dtype), zeros(128, dtype=dtype), name=f"{name}_{dtype.__name__}", ulp=bound)
    def kernel(x, y):
        i = tw.gpu_thread_id()
        y[i] = function(x[i])


for _name, _low, _high in (
    ("exp", -8, 8), ("exp2", -8, 8), ("log", 0.1, 50), ("log2", 0.1, 50), ("sin", -9, 9), ("cos", -9, 9), ("tanh", -4, 4), ("sqrt", 0, 90),
    ("rsqrt", 0.1, 90), ("floor", -9, 9), ("ceil", -9, 9), ("sigmoid", -6, 6), ("erf", -3, 3),
):  # fmt: skip
    _math(_name, _low, _high, np.float32)
for _name, _low, _high in (("exp", -8, 8), ("log", 0.1, 50), ("sin", -9, 9), ("tanh", -4, 4)):
    _math(_name, _low, _high, np.float64)


@case(2, 32, floats(64, low=0.1, high=5), floats(64, low=-3, high=3), zeros(64), ulp=8)
def powers(x, y, z):
    i = tw.gpu_thread_id()
    z[i] = x[i] ** y[i] + x[i] ** 2


@case(2, 32, floats(64), floats(64), floats(64), zeros(64))
def fused(x, y, z, out):
    i = tw.gpu_thread_id()
    out[i] = tw.fma(x[i], y[i], z[i])
