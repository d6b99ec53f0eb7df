"""OpenCL through SPIR-V against OpenCL C as people write it, and against our own code for CPUs, on one device.

In: whether the run is quick. Out: cases for `harness.measure`: add, sum, softmax of rows, product of matrices. All arrays stay on the device; a call ends when
its result is there. The hand-written kernels are those of the usual tutorials: one element a thread; a tree in local memory and a second pass; a group for each
row; tiles of 16 x 16 in local memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import tilewright as tw
from bench.harness import OURS, Bar, Case, Prepared, Variant
from bench.peers import PeerMissing

_SOURCE = """
kernel void add(global const float *x, global const float *y, global float *out, long n) {
    long i = get_global_id(0);
    if (i < n) out[i] = x[i] + y[i];
}
kernel void total(global const float *x, global float *out, long n) {
    local float part[256];
    int t = get_local_id(0);
    float s = 0.0f;
    for (long i = get_global_id(0); i < n; i += get_global_size(0)) s += x[i];
    part[t] = s;
    for (int step = 128; step; step /= 2) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (t < step) part[t] += part[t + step];
    }
    if (t == 0) out[get_group_id(0)] = part[0];
}
kernel void softmax(global const float *x, global float *out, long n) {
    local float part[256];
    int t = get_local_id(0);
    global const float *row = x + get_group_id(0) * n;
    global float *to = out + get_group_id(0) * n;
    float m = -INFINITY;
    for (long i = t; i < n; i += 256) m = fmax(m, row[i]);
    part[t] = m;
    for (int step = 128; step; step /= 2) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (t < step) part[t] = fmax(part[t], part[t + step]);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    m = part[0];
    barrier(CLK_LOCAL_MEM_FENCE);
    float s = 0.0f;
    for (long i = t; i < n; i += 256) { float e = exp(row[i] - m); to[i] = e; s += e; }
    part[t] = s;
    for (int step = 128; step; step /= 2) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (t < step) part[t] += part[t + step];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    s = part[0];
    for (long i = t; i < n; i += 256) to[i] /= s;
}
kernel void matmul(global const float *a, global const float *b, global float *c, long n) {
    local float x[16][16], y[16][16];
    int i = get_local_id(1), j = get_local_id(0);
    long row = get_group_id(1) * 16 + i, column = get_group_id(0) * 16 + j;
    float s = 0.0f;
    for (long k = 0; k < n; k += 16) {
        x[i][j] = a[row * n + k + j];
        y[i][j] = b[(k + i) * n + column];
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int p = 0; p < 16; p++) s += x[i][p] * y[p][j];
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    c[row * n + column] = s;
}
"""


@tw.kernel
def add(x: tw.Array, y: tw.Array) -> tw.Array:
    (n,) = x.shape
    out = tw.empty((n,), tw.f32)
    for i in tw.grid(n):
        out[i] = x[i] + y[i]
    return out


@tw.kernel
def total(x: tw.Array) -> float:
    return tw.sum(x)


@tw.kernel
def softmax(x: tw.Array) -> tw.Array:
    rows, columns = x.shape
    out = tw.empty((rows, columns), tw.f32)
    for i in tw.grid(rows):
        largest = tw.max(x[i])
        weights = tw.exp(x[i] - largest)
        out[i] = weights / tw.sum(weights)
    return out


@tw.kernel
def matmul(a: tw.Array, b: tw.Array) -> tw.Array:
    (m, k), n = a.shape, b.shape[1]
    out = tw.empty((m, n), tw.f32)
    for i, j in tw.grid(m, n):
        s = 0.0
        for p in range(k):
            s += a[i, p] * b[p, j]
        out[i, j] = s
    return out


HAND, CPU = "OpenCL C", "tilewright cpu"
_GROUPS = 64


def cases(quick: bool) -> list[Case]:
    """The four cases, each against hand-written OpenCL C, and once more against our own code for the CPU, of whose speed it should have half."""
    try:
        import pyopencl as cl
    except ImportError:
        raise PeerMissing("pyopencl is not installed; pip install 'tilewright[opencl]'") from None
    from tilewright.runtime.opencl.device import FOUND

    found = FOUND.devices()
    if not found:
        raise PeerMissing(f"no OpenCL device: {FOUND.unavailable_reason()}")
    bench = _Bench(cl, found[0])
    n, side, rows = (1 << 20, 256, 256) if quick else (1 << 22, 512, 1024)
    found_cases = []
    for end, bar in (("", Bar(1.0, (HAND,))), ("_cpu", Bar(0.5, (CPU,)))):
        found_cases += [
            Case(f"opencl_add{end}", (n,), "f32", 12 * n, lambda p=bar.peers[0]: bench.prepare(add, "add", (n,), 2, (n,), lambda x, y: x + y, p), bar),
            Case(f"opencl_sum{end}", (n,), "f32", 4 * n, lambda p=bar.peers[0]: bench.prepare(total, "total", (n,), 1, (1,), lambda x: x.sum(), p), bar),
            Case(f"opencl_softmax{end}", (rows, 1024), "f32", 8 * rows * 1024, lambda p=bar.peers[0]: bench.prepare(softmax, "softmax", (rows, 1024), 1, (rows, 1024), _softmax, p), bar),
            Case(f"opencl_matmul{end}", (side, side), "f32", 12 * side * side, lambda p=bar.peers[0]: bench.prepare(matmul, "matmul", (side, side), 2, (side, side), np.matmul, p), bar),
        ]  # fmt: skip
    return found_cases


def _softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


class _Bench:
    """A device with the hand-written kernels."""

    def __init__(self, cl: Any, device: Any) -> None:
        self.cl, self.device = cl, device
        self.queue = cl.CommandQueue(device.context)
        self.program = cl.Program(device.context, _SOURCE).build()

    def prepare(self, kernel: tw.Kernel, name: str, shape: tuple[int, ...], inputs: int, result: tuple[int, ...], reference: Callable[..., Any], peer: str) -> Prepared:
        cl, context = self.cl, self.device.context
        rng = np.random.default_rng(0)
        hosts = [rng.standard_normal(shape).astype(np.float32) for _ in range(inputs)]
        ours = [tw.to_device(x, self.device.id) for x in hosts]
        flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
        theirs = [cl.Buffer(context, flags, hostbuf=x) for x in hosts]
        out = cl.Buffer(context, cl.mem_flags.READ_WRITE, 4 * int(np.prod(result)))
        parts = cl.Buffer(context, cl.mem_flags.READ_WRITE, 4 * _GROUPS)
        wanted = reference(*(x.astype(np.float64) for x in hosts))
        hand = cl.Kernel(self.program, name)
        n = np.int64(shape[-1])

        def run_ours(slot: int) -> object:
            made = kernel(*ours)
            self.device.synchronize(0)
            return made

        def run_hand(slot: int) -> object:
            if name == "total":
                hand(self.queue, (_GROUPS * 256,), (256,), theirs[0], parts, n)
                hand(self.queue, (256,), (256,), parts, out, np.int64(_GROUPS))
            elif name == "softmax":
                hand(self.queue, (shape[0] * 256,), (256,), theirs[0], out, n)
            elif name == "matmul":
                hand(self.queue, shape, (16, 16), *theirs, out, n)
            else:
                hand(self.queue, shape, (256,), *theirs, out, n)
            self.queue.finish()
            return out

        def verify(slot: int, found: object, variant: Variant) -> str:
            if variant.name == HAND:
                values = np.empty(result, np.float32)
                cl.enqueue_copy(self.queue, values, out)
            else:
                values = np.asarray(found.numpy() if hasattr(found, "numpy") else found).reshape(result)
            error = float(np.max(np.abs(values - np.reshape(wanted, result))))
            return "" if error <= 1e-2 else f"off by {error}"

        variants = [
            Variant(OURS, run_ours, returns=True), Variant(HAND, run_hand, returns=True),
            Variant(CPU, lambda slot: kernel(*hosts, device="cpu"), returns=True),
        ]  # fmt: skip
        variants = [one for one in variants if one.name in (OURS, peer)]
        return Prepared(variants, lambda: None, verify)
