"""Long sums of products on GPUs are added up in levels: in the order the schedule says, to the last bit, and with the small errors that is for."""

from __future__ import annotations

import numpy as np
import pytest

from kernels_matrix import BY_NAME, again, on
from tilewright.base.errors import UserError
from tilewright.base.target import parse_target
from tilewright.execute.devices import emulator_device
from tilewright.ir.numerics import fma

SMALL = "family=fma m=32 n=32 k=8 stages=3 persistent=0"
LARGE = "family=fma m=128 n=128 k=16 stages=2 warps_m=2 warps_n=2 persistent=0"
F64 = "family=mma m=32 n=32 k=16 stages=4 warps_n=2 persistent=0"


def in_stretches(a: np.ndarray, b: np.ndarray, lengths: tuple[int, ...]) -> np.ndarray:
    """a @ b with multiply-adds, term by term in the innermost of the stretches."""
    k, zero = a.shape[1], np.zeros((a.shape[0], b.shape[1]), a.dtype)
    if not lengths:
        for p in range(k):
            zero = fma(a[:, p, None], b[None, p], zero)
        return zero
    for first in range(0, k, lengths[0]):
        zero = zero + in_stretches(a[:, first : first + lengths[0]], b[first : first + lengths[0]], lengths[1:])
    return zero


def errors(found: np.ndarray, want: np.ndarray) -> np.ndarray:
    off = np.abs(found - want)
    return np.array([off.max(), np.sqrt(np.mean(off**2))])


@pytest.mark.parametrize(
    ("name", "schedule", "lengths"),
    [
        ("kn_f32", SMALL, ()),
        ("kn_f32", f"{SMALL} chunk=16", (16,)),
        ("nk_f32", f"{SMALL} chunk=8 chunks=3", (24, 8)),
        ("kn_f32", f"{LARGE} chunk=32", (32,)),
        ("kn_f32", f"{LARGE} chunk=16 chunks=2", (32, 16)),
        ("kn_f64", f"{F64} chunk=32", (32,)),
        ("kn_f64", f"{F64} chunk=16 chunks=4", (64, 16)),
    ],
)
def test_the_order_is_the_schedules(name: str, schedule: str, lengths: tuple[int, ...]) -> None:
    """With sums kept in registers and in shared memory, and a last stretch that is shorter."""
    case = BY_NAME[name]
    a, b = case.arguments((33, 35, 103))
    found = on(again(case.kernel, schedule=schedule), emulator_device("thread", parse_target("sm_90a")))((a, b))
    np.testing.assert_array_equal(np.asarray(found), in_stretches(a, b if name.startswith("kn") else b.T, lengths))


@pytest.mark.parametrize(("target", "k", "least"), [("sm_90a", 203, 1.5), ("sm_90a", 1000, 3.0), ("sm_80", 1000, 3.0), ("sm_89", 1000, 3.0)])
@pytest.mark.parametrize("name", ["kn_f32", "kn_f64"])
def test_sums_of_few_results_err_much_less_than_a_chain(name: str, target: str, k: int, least: float) -> None:
    case = BY_NAME[name]
    a, b = case.arguments((32, 33, k))
    want = a.astype(np.longdouble) @ b.astype(np.longdouble)
    found = np.asarray(on(case.kernel, emulator_device("thread", parse_target(target)))((a, b)))
    chain, ours = errors(in_stretches(a, b, ()), want), errors(found, want)
    assert (least * ours <= chain).all(), f"{ours}, in a chain {chain}"


def test_the_sum_of_a_convolution_errs_much_less_than_a_chain() -> None:
    case = BY_NAME["conv_nchw_s1p1d1_f32"]
    sizes = (1, 128, 4, 4, 17, 5, 2)
    arguments = case.arguments(sizes)
    want = case.expected(arguments)
    device = emulator_device("thread", parse_target("sm_90a"))
    whole = again(case.kernel, schedule=f"{SMALL} chunk=0")
    by_default, plain = case.kernel, again(case.kernel, precision="ieee")
    chain, parts, ours = (errors(np.asarray(on(kernel, device)(arguments)), want) for kernel in (whole, by_default, plain))
    assert (3 * ours <= chain).all(), f"{ours}, in a chain {chain}"
    assert (2 * parts <= chain).all(), f"{parts} in parts of tf32, in a chain {chain}"


def test_a_chunk_is_whole_steps() -> None:
    case = BY_NAME["kn_f32"]
    with pytest.raises(UserError, match="whole steps"):
        on(again(case.kernel, schedule=f"{SMALL} chunk=12"), emulator_device("thread", parse_target("sm_90a")))(case.arguments((33, 35, 103)))
