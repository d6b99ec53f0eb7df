"""Numbers of bf16 in LLVM's hands: what its code calls on a CPU without instructions for them is in the object."""

from __future__ import annotations

import ctypes

import numpy as np

from tilewright.base.dtypes import bf16
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


def test_floats_round_to_even() -> None:
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, 1e-37, 1.00390625, 1.01171875, 65535.0], np.float32)
    bits = np.random.default_rng(3).integers(0, 1 << 32, 20_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    x = np.concatenate([special, bits])
    x = x[np.isnan(x) | (np.abs(x) == 0) | (np.abs(x) >= np.finfo(np.float32).tiny)]  # instructions take smaller ones for 0
    code = ObjectCode(compile_object(TEXT, host_cpu()))
    found = np.zeros(len(x), np.uint16)
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)(code.address("rounded"))
    call(x.ctypes.data, found.ctypes.data, len(x))
    with np.errstate(all="ignore"):
        wanted = x.astype(bf16.numpy).view(np.uint16)
    numbers = ~np.isnan(x)
    np.testing.assert_array_equal(found[numbers], wanted[numbers])
    assert np.isnan(found[~numbers].view(bf16.numpy).astype(np.float32)).all()


def test_only_objects_that_call_it_have_it() -> None:
    name = b"__truncsfbf2"
    for target in ("x86-64-avx2", "x86-64-avx512"):
        assert name in compile_object(TEXT, parse_target(target))
        assert name not in compile_object(TEXT.replace("bfloat", "half"), parse_target(target))
    assert name not in compile_object(TEXT, parse_target("aarch64-neon"))
