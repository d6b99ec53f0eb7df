"""One small explicit kernel for every word and operator, to be generated for every dtype and target.

A case is a word and a body. In it `x`, `y` are arrays of the dtype, `m` a matrix of it, `s` shared memory of it, `i` the thread, and
`put(value)` keeps a value of any dtype, so that nothing is dead code. `SOURCE` is a Python file with one kernel for each case.
"""

from __future__ import annotations

import re

from tilewright.ir.ops_simt import COPY_CACHES, LOAD_CACHES, STORE_CACHES

THREADS = 128

_FUNCTIONS = (
    "exp exp2 log log2 sin cos tan tanh sinh cosh erf exp10 expm1 log10 log1p asin acos atan asinh acosh atanh cbrt erfc lgamma tgamma sign isinf isfinite sqrt rsqrt sigmoid rsqrt_approx floor ceil round trunc abs isnan relu "
    "fast_exp fast_exp2 fast_log fast_log2 fast_sin fast_cos fast_sqrt fast_rsqrt fast_rcp fast_tanh popcount clz ctz ffs brev"
)  # fmt: skip
_TWO = "pow atan2 hypot fmod copysign nextafter ldexp rotate_left rotate_right minimum maximum mul_high fast_divide"
_BUILTINS = "abs int float bool round"
_VOTES = "vote_any vote_all vote_uniform ballot match_any redux_add redux_min redux_max redux_and redux_or redux_xor"
_PLAIN = (
    "gpu_sync barrier warp_sync fence fence_async fence_init copy_commit bulk_commit wait_previous release_next cluster_sync grid_sync"
)  # fmt: skip
_NUMBERS = "gpu_thread_id lane_id warp_id lane_mask active_mask elect clock clock32 global_timer"
_ATOMICS = "add sub min max and or xor exchange inc dec"

BODIES: list[tuple[str, str]] = [
    *((word, f"put(tw.{word}(x[i]))") for word in _FUNCTIONS.split()),
    *((word, f"o[i] = tw.{word}(x[i])") for word in _FUNCTIONS.split()),
    *((word, f"put(tw.{word}(x[i], y[i]))") for word in _TWO.split()),
    *((word, f"put(tw.{word}(x[i], 2))") for word in _TWO.split()),
    *((word, f"put({word}(x[i]))") for word in _BUILTINS.split()),
    *((word, f"put(tw.{word}(x[i]))") for word in _VOTES.split()),
    *((word, f"tw.{word}()") for word in _PLAIN.split()),
    *((word, f"put(tw.{word}())") for word in _NUMBERS.split()),
    ("min", "put(min(x[i], y[i], 3))"),
    ("max", "put(max(x[i], 0, y[i]))"),
    ("hypot", "put(math.hypot(x[i], y[i]))"),
    ("ldexp", "put(tw.ldexp(x[i], i))"),
    ("frexp", "a, b = tw.frexp(x[i])\nput(a)\nput(b)"),
    ("rotate_left", "put(tw.rotate_left(x[i], i))"),
    ("fma", "put(tw.fma(x[i], y[i], x[0]))"),
    ("clamp", "put(tw.clamp(x[i], y[i], x[0]))"),
    ("clamp", "put(tw.clamp(x[i], 0, 1))"),
    ("where", "put(tw.where(x[i], x[i], y[i]))"),
    ("where", "o[i] = tw.where(x[i] > y[i], x[i], y[i])"),
    ("cast", "put(tw.cast(x[i], tw.i32))"),
    *(("cast", f"put(tw.{name}(x[i]))") for name in ["i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64", "f8e4m3", "f8e5m2", "f16", "bf16", "f32", "f64", "bool_"]),
    *(("bitcast", f"put(tw.bitcast(x[i], tw.{name}))") for name in ["i8", "u8", "f8e4m3", "f8e5m2", "i16", "u16", "f16", "bf16", "i32", "u32", "f32", "i64", "u64", "f64", "bool_"]),
    *((f"random.{word}", f"put(tw.random.{word}(x[i], i))") for word in ("bits", "uniform", "normal")),
    *((f"random.{word}", f"put(tw.random.{word}(7, i, dtype=x.dtype))") for word in ("bits", "uniform", "normal")),
    ("random.randint", "put(tw.random.randint(7, x[i], 100, i))"),
    ("random.randint", "put(tw.random.randint(7, 0, 100, i, dtype=x.dtype))"),
    ("len", "put(len(x) + x.size + x.shape[0])"),
    ("print", "print(x[i], tw.f32(1), i)"),
    ("vote_any", "put(tw.vote_any(x[i], lanes=0xFF))"),
    ("match_all", "a, b = tw.match_all(x[i])\nput(a)\nput(b)"),
    *((word, f"put(tw.{word}(x[i], 1))") for word in ("shuffle", "shuffle_up", "shuffle_down", "shuffle_xor")),
    *((word, f"o[i] = tw.{word}(x[i], 1, width=8)") for word in ("shuffle", "shuffle_up", "shuffle_down", "shuffle_xor")),
    *((word, f"put(tw.{word}(x[i]))") for word in ("barrier_count", "barrier_and", "barrier_or")),
    ("named_barrier", "tw.named_barrier(1, 64)"),
    ("named_arrive", "tw.named_arrive(1, 64)"),
    ("fence", "tw.fence('block')\ntw.fence('system')"),
    ("nanosleep", "tw.nanosleep(x[i])"),
    ("nanosleep", "tw.nanosleep(100)"),
    ("lane_mask", "put(tw.lane_mask('ge'))"),
    *((f"redux_{kind}", f"put(tw.redux_{kind}(x[i], lanes=0xFFFFFFFF))") for kind in ("add", "and", "min")),
    ("byte_perm", "put(tw.byte_perm(x[i], y[i], 0x3210))"),
    ("funnel_left", "put(tw.funnel_left(x[i], y[i], 3))"),
    ("funnel_right", "put(tw.funnel_right(x[i], y[i], 3))"),
    ("dp4a", "put(tw.dp4a(x[i], y[i], 1))"),
    ("pack_bits", "put(tw.pack_bits((x[i], y[i]), x.dtype))"),
    ("pack_bits", "put(tw.pack_bits((x[i], y[i], x[0], y[0]), x.dtype))"),
    ("unpack_bits", "a = tw.unpack_bits(tw.u32(i), x.dtype)\nput(a[0])\no[i] = a[1]"),
    ("unpack_bits", "a = tw.unpack_bits(tw.u32(x[i]), tw.u8)\nput(a[0] + a[3])"),
    # memory
    ("shared", "t = tw.shared((4, 32), x.dtype, align=64)\nt[0, i % 32] = x[i]\ntw.gpu_sync()\nput(t[0, (i + 1) % 32])"),
    ("local", "t = tw.local(8, x.dtype)\nfor k in range(8):\n    t[k] = x[k]\nput(t[i % 8])"),
    ("shared_dynamic", "t = tw.shared_dynamic(x.dtype)\nt[i % 16] = x[i]\ntw.gpu_sync()\nput(t[0])"),
    *(("vload", f"a = tw.vload(x, {width} * i, width={width})\nput(a[0])\ntw.vstore(o, {width} * i, a)") for width in (2, 4, 8, 16)),
    *(("vload", f"put(tw.vload(x, i, cache='{cache}'))")
      for cache in LOAD_CACHES),
    *(("vstore", f"tw.vstore(o, i, x[i], cache='{cache}')")
      for cache in STORE_CACHES),
    ("prefetch", "tw.prefetch(x, i)"),
    *((f"atomic_{kind}", f"put(tw.atomic_{kind}(o, 0, x[i]))") for kind in _ATOMICS.split()),
    *((f"atomic_{kind}", f"put(tw.atomic_{kind}(s, 0, x[i], scope='block', order='acq_rel'))") for kind in _ATOMICS.split()),
    *((f"atomic_{kind}", f"tw.atomic_{kind}(o, 0, x[i], scope='system', order='release')") for kind in _ATOMICS.split()),
    *((f"atomic_{kind}", f"put(tw.atomic_{kind}(s, 0, x[i], rank=0))") for kind in (*_ATOMICS.split(),)),
    *(("atomic_add", f"tw.atomic_add(o, {width} * i, tw.vload(x, {width} * i, width={width}))") for width in (2, 4, 8)),
    ("atomic_cas", "put(tw.atomic_cas(o, 0, x[i], y[i]))"),
    ("atomic_cas", "put(tw.atomic_cas(s, 0, x[i], y[i], order='acquire'))"),
    ("atomic_load", "put(tw.atomic_load(x, i, order='acquire'))"),
    *(("atomic_load", f"a = tw.atomic_load(x, {width} * i, width={width})\ntw.atomic_store(o, {width} * i, a)") for width in (2, 4, 8, 16)),
    ("atomic_store", "tw.atomic_store(o, i, x[i], order='release', scope='system')"),
    # copies and clusters
    *(("copy_async", f"tw.copy_async(s, {count} * i, x, {count} * i, count={count})\ntw.copy_commit()\ntw.copy_wait()\ntw.gpu_sync()\nput(s[i])")
      for count in (1, 2, 4, 8, 16)),
    *(("copy_async", f"tw.copy_async(s, 4 * i, x, 4 * i, count=4, where=x[i], cache='{cache}')\ntw.copy_wait()") for cache in COPY_CACHES),
    ("copy_wait", "tw.copy_wait(1)"),
    ("mbarriers", "b = tw.mbarriers(2)\ntw.mbarrier_init(b, 0, 128)\ntw.fence_init()\ntw.gpu_sync()\ntw.mbarrier_arrive(b, 0)\ntw.mbarrier_wait(b, 0, 0)"),
    ("bulk_load", "b = tw.mbarriers(1)\ntw.mbarrier_init(b, 0, 1)\ntw.gpu_sync()\nif i == 0:\n    tw.mbarrier_expect(b, 0, 256)\n"
     "    tw.bulk_load(s, 0, x, 0, 128, b, 0)\ntw.mbarrier_wait(b, 0, 0)\nput(s[i])"),
    ("bulk_store", "s[i] = x[i]\ntw.fence_async()\ntw.gpu_sync()\nif i == 0:\n    tw.bulk_store(s, 0, o, 0, 128)\n    tw.bulk_commit()\n    tw.bulk_wait()"),
    ("bulk_wait", "tw.bulk_commit()\ntw.bulk_wait(1, read=True)"),
    ("tma_load", "b = tw.mbarriers(1)\nmap = tw.tensor_map(m, (16, 16))\nt = tw.shared((16, 16), x.dtype, align=128)\ntw.mbarrier_init(b, 0, 1)\n"
     "tw.gpu_sync()\nif i == 0:\n    tw.tma_load(t, 0, map, (0, 0), b, 0)\n    tw.tma_store(t, 0, map, (0, 0))\nput(t[0, 0])"),
    ("load_remote", "put(tw.load_remote(s, i, 0))"),
    ("store_remote", "tw.store_remote(s, i, 0, x[i])"),
    ("mbarrier_arrive", "b = tw.mbarriers(1)\ntw.mbarrier_init(b, 0, 1)\ntw.mbarrier_arrive(b, 0, rank=0)"),
    # matrices
    ("fragment_mma", "a = tw.fragment_a(m, (0, 0))\nb = tw.fragment_b(m, (0, 0), transposed=True)\n"
     "c = tw.fragment_mma(a, b, tw.fragment_c(), x.dtype)\ntw.fragment_store(m, (0, 0), c)"),
    ("fragment_mma", "a = tw.fragment_a(m, (0, 0), transposed=True)\nb = tw.fragment_b(m, (0, 0))\n"
     "c = tw.fragment_mma(a, b, tw.fragment_c(1, tw.i32), x.dtype)\ntw.fragment_store(m, (0, 0), c)"),
    ("fragment_c", "tw.fragment_store(m, (0, 0), tw.fragment_c(x[i], x.dtype))"),
    ("fragment_load", "c = tw.fragment_load(m, (0, 0))\nput(c[0])\ntw.fragment_store(m, (16, 16), c)"),
    *(("wmma_mma", f"c = tw.wmma_fill({number})\na = tw.wmma_load(m, (0, 0), 'a', '{shape}')\nb = tw.wmma_load(m, (0, 0), 'b', '{shape}', transposed=True)\n"
       f"c = tw.wmma_mma(a, b, tw.wmma_fill({number}))\ntw.wmma_store(m, (0, 0), c)")
      for shape, number in (("m16n16k16", "0, 'm16n16k16'"), ("m32n8k16", "0, 'm32n8k16', tw.i32"), ("m8n32k16", "0, 'm8n32k16', tw.f32"), ("m16n16k8", ""))),
    ("mma_sync", "a = tw.u32(i)\nc = tw.f32(0)\nd = tw.mma_sync((a, a, a, a), (a, a), (c, c, c, c), x.dtype)\nput(d[0])"),
    ("mma_sync", "a = tw.u32(i)\nc = tw.i32(0)\nd = tw.mma_sync((a, a, a, a), (a, a), (c, c, c, c), x.dtype)\nput(d[0])"),
    ("mma_sync", "a = tw.f64(i)\nd = tw.mma_sync((a,), (a,), (a, a), x.dtype)\nput(d[0])"),
    ("ldmatrix", "a = tw.ldmatrix(s, 8 * (i % 32))\nput(a[0])\nb = tw.ldmatrix(s, 8 * (i % 8), count=1, trans=True)\nput(b[0])"),
    ("stmatrix", "a = tw.u32(i)\ntw.stmatrix(s, 8 * (i % 32), (a, a), trans=True)\nput(s[i])"),
    ("wgmma", "t = tw.shared(8192, x.dtype, align=1024)\nz = tw.f32(0)\nc = (z, z, z, z)\nc = tw.wgmma(t, 0, t, 4096, c, n=8)\nc = tw.wgmma_wait(c)\nput(c[0])"),
    ("wgmma", "t = tw.shared(8192, x.dtype, align=1024)\nz = tw.i32(0)\nc = (z, z, z, z)\nc = tw.wgmma(t, 0, t, 4096, c, n=8)\nc = tw.wgmma_wait(c)\nput(c[0])"),
    ("wgmma_wait", "c = tw.wgmma_wait((x[i], y[i]))\nput(c[0])"),
    ("set_registers", "tw.set_registers(40, 'decrease')"),
    # operators and statements
    *(("operator", f"put(x[i] {sign} y[i])") for sign in ["+", "-", "*", "/", "//", "%", "**", "&", "|", "^", "<<", ">>", "==", "!=", "<", "<=", ">", ">="]),
    *(("operator", f"put(x[i] {sign} 2)") for sign in ["+", "-", "*", "/", "//", "%", "**", "&", "|", "^", "<<", ">>", "==", "!=", "<", "<=", ">", ">="]),
    *(("operator", f"put(2.5 {sign} x[i])") for sign in ["+", "-", "*", "/", "//", "%", "**"]),
    *(("operator", f"put({sign}x[i])") for sign in ("-", "~", "not ", "+")),
    ("operator", "put(x[i] and y[i])"),
    ("operator", "put(x[i] or y[i])"),
    ("operator", "put(x[i] if y[i] else y[0])"),
    ("operator", "put(0 < x[i] <= y[i])"),
    ("statement", "o[i] = x[i]"),
    ("statement", "o[i] += x[i]"),
    ("statement", "o[i] = 1"),
    ("statement", "o[i] = 0.5"),
    ("statement", "o[i] = x[i] + y[i]"),
    ("statement", "o[i] = x[i] * 2 - 1"),
    ("statement", "if x[i]:\n    o[i] = y[i]"),
    ("statement", "total = x[i]\nfor k in range(n):\n    total = total + x[k]\nput(total)"),
    ("statement", "total = x[i]\nwhile total < y[i]:\n    total = total + 1\nput(total)"),
    ("statement", "best = x[i]\nfor k in range(n):\n    if x[k] > best:\n        best = x[k]\n    if not best:\n        break\nput(best)"),
    ("statement", "for k in range(x[0], y[0]):\n    put(k)"),
    ("statement", "put(x[y[i]])"),
    ("statement", "assert x[i] == y[i], 'different'"),
    ("statement", "put(tw.cluster.rank + tw.cluster.size + tw.grid.x + tw.warp.size)"),
]  # fmt: skip

_HEAD = """import math
import tilewright as tw


def put(kept, i, value):
    kept[i] = tw.f64(value)
"""
_KERNEL = """

@tw.gpu
def case_{number}(x, y, m, o, kept, n: tw.i32):
    i = tw.thread.x
{body}
"""


def _body(text: str) -> str:
    shared = "s = tw.shared(2048, x.dtype, align=128)\n" if re.search(r"\bs[\[,]", text) else ""
    return "\n".join(f"    {line}" for line in (shared + text.replace("put(", "put(kept, i, ")).splitlines())


SOURCE = _HEAD + "".join(_KERNEL.format(number=number, body=_body(body)) for number, (_, body) in enumerate(BODIES))
