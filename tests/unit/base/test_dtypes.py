"""Element types: names, storage, promotion and loss, held against NumPy."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest

from tilewright.base import simd
from tilewright.base.dtypes import (
    ALL,
    SCALARS,
    DType,
    accumulator,
    bf16,
    bool_,
    by_name,
    compute_dtype,
    f8e4m3,
    f16,
    f32,
    f64,
    from_numpy,
    i8,
    i16,
    i64,
    is_name,
    loses,
    promote,
    q4_0,
    u8,
    u64,
)
from tilewright.base.errors import UserError

INTEGERS = [d for d in SCALARS if d.is_int]


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_names_and_storage(dtype: DType) -> None:
    assert by_name(dtype.name) is dtype and is_name(dtype.name)
    assert dtype.numpy.itemsize == dtype.itemsize
    assert pickle.loads(pickle.dumps(dtype)) is dtype


@pytest.mark.parametrize("dtype", SCALARS, ids=str)
def test_numpy_and_back(dtype: DType) -> None:
    assert from_numpy(dtype.numpy) is dtype
    assert dtype(1).dtype == dtype.numpy


def test_names_nobody_knows() -> None:
    assert by_name("float32") is f32 and by_name("half") is f16 and by_name("fp8") is f8e4m3
    assert not is_name("f128")
    with pytest.raises(KeyError):
        by_name("f128")
    assert from_numpy(np.dtype(np.complex64)) is None
    assert from_numpy(np.dtype(">f4")) is None


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_ranges_of_integers(dtype: DType) -> None:
    limits = np.iinfo(dtype.numpy)
    assert (dtype.min_value, dtype.max_value) == (limits.min, limits.max)


def test_identities_of_other_types() -> None:
    assert (bool_.min_value, bool_.max_value) == (False, True)
    assert (f32.min_value, f32.max_value) == (float("-inf"), float("inf"))
    assert (f8e4m3.min_value, f8e4m3.max_value) == (-448.0, 448.0)


def test_promotion_is_symmetric_and_keeps_both() -> None:
    for a, b in itertools.combinations_with_replacement(ALL, 2):
        both = promote(a, b)
        assert both is promote(b, a), (a, b)
        assert both is None or not (loses(a, both) or loses(b, both)), (a, b)


def test_integers_promote_and_lose_as_in_numpy() -> None:
    for a, b in itertools.product(INTEGERS, repeat=2):
        wide = np.promote_types(a.numpy, b.numpy)
        assert promote(a, b) is (from_numpy(wide) if wide.kind in "iu" else None), (a, b)
        assert loses(a, b) == (not np.can_cast(a.numpy, b.numpy, "safe")), (a, b)


def test_pairs_without_a_common_type() -> None:
    assert promote(f16, bf16) is None
    assert promote(u64, i8) is None
    assert promote(f32, i64) is None
    assert promote(q4_0, f32) is None
    assert promote(f32, i16) is f32 and promote(bool_, u8) is u8


def test_what_is_computed_in_what() -> None:
    assert (accumulator(bf16), accumulator(u8), accumulator(bool_), accumulator(i16), accumulator(f64)) == (f32, u64, i64, i64, f64)
    assert (compute_dtype(f16), compute_dtype(f64), compute_dtype(i8)) == (f32, f64, i8)


@pytest.mark.parametrize("kind", simd.TYPES.values(), ids=repr)
def test_vectors(kind: simd.SimdType) -> None:
    assert kind.width * kind.dtype.itemsize in (16, 32, 64)
    assert simd.simd_type(kind.dtype, kind.width) is kind is pickle.loads(pickle.dumps(kind))
    assert (simd.mask_of(kind).dtype, simd.mask_of(kind).width) == (bool_, kind.width)
    with pytest.raises(UserError, match=rf"tilewright\.{kind.__name__} has a meaning only inside"):
        kind(1.0)
    with pytest.raises(UserError, match=rf"{kind.__name__}\.load"):
        kind.load(np.zeros(4), 0)
