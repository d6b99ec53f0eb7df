"""Numbers of bf16 in LLVM's hands: what its code calls on a CPU without instructions for them is in the object."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from tilewright.base.dtypes import DType, bf16, f16
from tilewright.base.target import host_cpu, parse_target
from tilewright.codegen.llvm.native import compile_object
from tilewright.runtime.core.objects import ObjectCode

TEXT = """
define void @rounded(ptr %x, ptr %y, i64 %n) {
start:
  br label %loop
loop:
  %i = phi i64 [0, %start], [%next, %loop]
  %from = getelementptr float, ptr %x, i64 %i
  %to = getelementptr bfloat, ptr %y, i64 %i
  %value = load float, ptr %from
  %short = fptrunc float %value to bfloat
  store bfloat %short, ptr %to
  %next = add i64 %i, 1
  %more = icmp slt i64 %next, %n
  br i1 %more, label %loop, label %end
end:
  ret void
}
"""


@pytest.mark.parametrize("short", [bf16, f16], ids=str)
@pytest.mark.parametrize("wide", [np.float32, np.float64])
def test_floats_round_to_even(wide: Any, short: DType) -> None:
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, 1e-37, 1.00390625, 1.01171875, 65535.0, 65519.99999, 65520.0, -65504.0, 1 + 2**-11 + 2**-40, 1 + 2**-9 + 2**-40]
    draw = np.random.default_rng(3)
    ties = (draw.integers(1 << 10, 1 << 11, 5000) + 0.5) * 2.0 ** draw.integers(-30, 20, 5000)
    near = ties * (1 + np.tile([2.0**-50, -(2.0**-50)], 2500))
    bits = draw.integers(0, 1 << 32, 20_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        x = np.concatenate([special, ties, near, bits]).astype(wide)
        wanted = x.astype(short.numpy).view(np.uint16)
    normal = np.isnan(x) | (np.abs(x) == 0) | (np.abs(x) >= np.finfo(np.float32).tiny)  # instructions take smaller ones for 0
    x, wanted = x[normal], wanted[normal]
    text = TEXT.replace("float", "double" if wide is np.float64 else "float").replace("bdouble", "bfloat")
    code = ObjectCode(compile_object(text.replace("bfloat", "bfloat" if short is bf16 else "half"), host_cpu()))
    found = np.zeros(len(x), np.uint16)
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)(code.address("rounded"))
    call(x.ctypes.data, found.ctypes.data, len(x))
    numbers = ~np.isnan(x)
    np.testing.assert_array_equal(found[numbers], wanted[numbers])
    assert np.isnan(found[~numbers].view(short.numpy).astype(np.float32)).all()


def test_only_objects_that_call_it_have_it() -> None:
    name = b"__truncsfbf2"
    for target in ("x86-64-avx2", "x86-64-avx512"):
        assert name in compile_object(TEXT, parse_target(target))
        assert name not in compile_object(TEXT.replace("bfloat", "half"), parse_target(target))
    assert name not in compile_object(TEXT, parse_target("aarch64-neon"))
