"""Tilewright: one kernel source in Python or ZynML, checked once, fast on every device.

    import tilewright as tw

    @tw.kernel
    def scale(m: tw.Array, v: tw.Array) -> tw.Array:
        rows, cols = m.shape
        out = tw.empty((rows, cols), tw.f32)
        for i, j in tw.grid(rows, cols):
            out[i, j] = m[i, j] * v[j]
        return out
"""

from __future__ import annotations

from tilewright.api.devices import Device, default_device, devices, set_default_device
from tilewright.api.kernel import Kernel, kernel
from tilewright.api.language import (
    Array,
    all,
    any,
    argmax,
    argmin,
    cast,
    ceil,
    clamp,
    cos,
    cosh,
    empty,
    empty_like,
    erf,
    exp,
    exp2,
    floor,
    fma,
    full,
    gelu,
    grid,
    inf,
    isnan,
    log,
    log2,
    max,
    maximum,
    min,
    minimum,
    prod,
    relu,
    rsqrt,
    sigmoid,
    silu,
    sin,
    sinh,
    softplus,
    sqrt,
    sum,
    tan,
    tanh,
    trunc,
    where,
    zeros,
)
from tilewright.base.dtypes import (
    DType,
    bf16,
    f8e4m3,
    f8e5m2,
    f16,
    f32,
    f64,
    i8,
    i16,
    i32,
    i64,
    q4_0,
    q4_k,
    q5_k,
    q6_k,
    q8_0,
    u8,
    u16,
    u32,
    u64,
)
from tilewright.base.dtypes import bool_ as bool_
from tilewright.base.errors import CompilerBug, DeviceError, TargetLimit, TilewrightError, UserError
from tilewright.runtime.cpu_pool import get_num_threads, set_num_threads
