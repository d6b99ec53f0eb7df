"""The exact texts of errors that only a call can make: wrong arguments, wrong sizes, wrong devices."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

import tilewright as tw
from kernel_table import (
    add_matrices,
    difference,
    gather,
    pointwise,
    reducing,
    scale_columns,
    scaled_sum,
    sum_and_difference,
)
from tilewright.base import registry
from tilewright.runtime.cuda import device as cuda

F32 = np.float32
HEAD = r"^.*kernel_table\.py:\d+:\d+: "


def m(*shape: int, dtype: type[np.generic] = F32) -> np.ndarray:
    return np.zeros(shape, dtype)


def message(call: Callable[[], object], kind: type[tw.TilewrightError] = tw.UserError) -> str:
    """The error's text without the place it points at and the excerpt, which other tests pin."""
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind or (kind in type(caught.value).__bases__ and isinstance(caught.value, TypeError | ValueError | IndexError))
    assert isinstance(caught.value, tw.TargetLimit) == issubclass(kind, tw.TargetLimit)
    lines = [line for line in str(caught.value).splitlines() if not re.match(r"^ *\d* *\|", line)]
    return "\n".join(re.sub(r"^.*?: (?=error\[)", "", line) for line in lines)


# -- sizes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "emulator:thread", "emulator:loop"])
def test_a_size_mismatch_names_both_arguments(device: str) -> None:
    assert message(lambda: scale_columns(m(3, 4), m(5), device=device)) == (
        "error[TW004]: size mismatch: axis 0 of 'v' is 5, but 'cols' is 4 (axis 1 of 'm')"
    )


def test_all_mismatches_come_together() -> None:
    text = message(lambda: add_matrices(m(3, 4), m(5, 6)))
    assert text == (
        "error[TW004]: size mismatch: axis 0 of 'y' is 5, but 'rows' is 3 (axis 0 of 'x')\n"
        "error[TW004]: size mismatch: axis 1 of 'y' is 6, but 'cols' is 4 (axis 1 of 'x')"
    )


def test_the_error_points_at_the_kernel() -> None:
    with pytest.raises(tw.UserError) as caught:
        scale_columns(m(3, 4), m(5))
    assert re.match(HEAD, str(caught.value))


def test_a_call_after_a_good_one_is_checked_too() -> None:
    """The first call leaves a fast entry behind; it must refuse what does not fit."""
    scale_columns(m(3, 4), m(4))
    scale_columns(m(3, 4), m(4))
    assert "axis 0 of 'v' is 5, but 'cols' is 4" in message(lambda: scale_columns(m(3, 4), m(5)))


@pytest.mark.parametrize("device", ["cpu", "emulator:thread"])
def test_a_result_of_negative_extent(device: str) -> None:
    assert message(lambda: difference(m(0), device=device)) == "error[TW004]: axis 0 of the result 'out' would have extent n - 1 = -1"


# -- rank and dtype -----------------------------------------------------------------------------------------------------


def test_wrong_rank() -> None:
    assert message(lambda: scale_columns(m(4), m(4))) == "error[TW003]: 'm' has rank 1, but 2 names are given"


def test_an_index_that_is_no_integer() -> None:
    assert message(lambda: gather(m(4), m(4))) == "error[TW009]: an index of 'x' must be an integer, got f32"


def test_a_dtype_that_would_lose_data() -> None:
    """Floats into an array of integers."""
    text = message(lambda: pointwise("$x * 0.5", 1, "tw.i32")(m(2)))
    assert "error[TW006]: 'out' is i32, and f32 does not fit it" in text


# -- what is no array -----------------------------------------------------------------------------------------------------


def test_a_list_is_no_array() -> None:
    assert message(lambda: scale_columns([[1.0]], m(1))) == (
        "error[TW009]: argument 'm' is a list, not an array or a number\n"
        "help: pass a NumPy array, for instance numpy.asarray(…)"
    )


def test_none_is_no_array() -> None:
    assert message(lambda: scale_columns(m(1, 1), None)) == (
        "error[TW009]: 'v' must be an array, got None\nhelp: annotate it as 'tw.Array | None' where it may be left out"
    )


def test_byte_swapped_array() -> None:
    assert message(lambda: scale_columns(np.zeros((2, 2), ">f4"), m(2))) == (
        "error[TW009]: argument 'm' has dtype >f4, which has the other byte order\nhelp: convert it with .astype(...)"
    )


@pytest.mark.parametrize("dtype", ["clongdouble", "datetime64[s]", "U3"])
def test_dtypes_that_are_no_numbers_of_ours(dtype: str) -> None:
    array = np.zeros((2, 2), dtype)
    assert message(lambda: scale_columns(array, m(2))) == (
        f"error[TW009]: argument 'm' has dtype {array.dtype}, which is not supported\n"
        "help: convert it to a bool, integer, float or complex dtype first"
    )


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 10**30])
def test_too_large_an_integer(value: int) -> None:
    assert message(lambda: scaled_sum(m(2), m(2), value, 1.0)) == (
        f"error[TW006]: argument 'a' is {value}, which no 64-bit integer holds"
    )


# -- arguments ------------------------------------------------------------------------------------------------------------


def test_missing_argument() -> None:
    assert message(lambda: scale_columns(m(1, 1))) == "error[TW008]: scale_columns is missing 'v'"
    assert message(lambda: scaled_sum(m(1))) == "error[TW008]: scaled_sum is missing 'y', 'a', 'b'"


def test_too_many_arguments() -> None:
    assert message(lambda: scale_columns(m(1, 1), m(1), m(1))) == "error[TW016]: scale_columns takes 2 argument(s) (m, v), got 3"


def test_unknown_argument() -> None:
    assert message(lambda: scale_columns(m(1, 1), w=m(1))) == (
        "error[TW016]: scale_columns has no argument 'w'\nhelp: its arguments are m, v"
    )


def test_an_argument_given_twice() -> None:
    assert message(lambda: scale_columns(m(1, 1), m(1), m=m(1, 1))) == "error[TW016]: scale_columns got 'm' twice"


# -- out= ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "emulator:tile"])
def test_out_of_the_wrong_shape(device: str) -> None:
    assert message(lambda: scale_columns(m(3, 4), m(4), out=m(4, 3), device=device)) == (
        "error[TW018]: out= for 'out' has shape [4, 3], but the result has [3, 4]"
    )


def test_out_of_the_wrong_dtype() -> None:
    assert message(lambda: scale_columns(m(3, 4), m(4), out=m(3, 4, dtype=np.float64))) == (
        "error[TW018]: out= for 'out' has dtype float64, but the result is float32\n"
        "help: make it with numpy.empty([3, 4], dtype='float32')"
    )


def test_out_that_is_read_only() -> None:
    out = m(3, 4)
    out.flags.writeable = False
    assert message(lambda: scale_columns(m(3, 4), m(4), out=out)) == "error[TW018]: out= for 'out' is read-only"


def test_out_that_is_no_array() -> None:
    assert message(lambda: scale_columns(m(3, 4), m(4), out=5)) == "error[TW018]: out= for 'out' is a int, not an array"


def test_too_few_outs() -> None:
    assert message(lambda: sum_and_difference(m(3), m(3), out=m(3))) == "error[TW018]: out= has 1 array(s), but the kernel returns 3"


def test_a_refused_out_is_not_touched() -> None:
    out = np.full((4, 3), 7, F32)
    message(lambda: scale_columns(m(3, 4), m(4), out=out))
    assert (out == 7).all()


# -- devices ------------------------------------------------------------------------------------------------------------


def test_unknown_device() -> None:
    assert message(lambda: scale_columns(m(1, 1), m(1), device="tpu")) == (
        f"error[TW030]: unknown device 'tpu'\nhelp: use {registry.usage()}"
    )


def test_a_device_is_a_name() -> None:
    assert message(lambda: scale_columns(m(1, 1), m(1), device=3)) == (
        "error[TW009]: device= is a int, not a name such as 'cpu' or 'cuda:0'"
    )


def test_a_gpu_that_is_not_there() -> None:
    name = f"cuda:{len(cuda.devices()) + 7}"
    text = message(lambda: scale_columns(m(1, 1), m(1), device=name), tw.DeviceError)
    assert text.startswith(f"error[TW030]: device '{name}' is not present: ")
    assert text.endswith("help: use device='cpu', or device='emulator' to run GPU code without a GPU")


def test_unknown_target() -> None:
    text = message(lambda: scale_columns.compile(m(1, 1), m(1), target="sm_1"))
    assert text.startswith("error[TW021]: unknown target 'sm_1'\nhelp: choose one of cpu, ")


def test_unknown_default_device() -> None:
    assert "error[TW030]: unknown device 'tpu'" in message(lambda: tw.set_default_device("tpu"))
    assert tw.default_device() == "cpu"


# -- words outside kernels ----------------------------------------------------------------------------------------------


def test_kernel_words_outside_kernels() -> None:
    assert message(lambda: tw.exp(1.0)) == (
        "error[TW005]: tilewright.exp has a meaning only inside a kernel\nhelp: mark the function with @tilewright.kernel"
    )


def test_a_maximum_of_nothing() -> None:
    text = message(lambda: reducing("argmax", "")(m(0)))
    assert re.match(r"error\[TW004\]: argmax of an empty axis \(at <table \d+>:3:12\)", text)


def test_the_emulator_finds_an_index_out_of_bounds() -> None:
    text = message(lambda: gather(m(4), np.array([0, 9]), device="emulator:thread"))
    assert text == "error[TW050]: load of 'x' at [9] is out of bounds: index 9, extent 4, in block (0), thread 0"
