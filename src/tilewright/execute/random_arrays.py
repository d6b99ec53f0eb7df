"""`tw.random`: random numbers by seed and index, as arrays and in kernels.

In: a seed, indices, and the shape, dtype and device of an array, or the array itself. Out: the array, filled. In kernels the same functions
are words of the language (`tree/check/random_draws.py`, `frontend/simt/words_random.py`); what they give there is the law for arrays too:

    tw.random.uniform(seed, *index, shape=shape)[place] == tw.random.uniform(seed, *index, e) in a kernel,

where e is the place of the element in row-major order. So an array does not depend on its device, nor its numbers on its shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, overload

import numpy as np

from tilewright.base.dtypes import DType, u64
from tilewright.base.errors import UserError, public, public_methods
from tilewright.execute.arrays import allocate, as_dtype, as_shape
from tilewright.execute.devices import array_device, default_device, find_device
from tilewright.execute.kernel import Kernel, kernel
from tilewright.frontend import words as tw
from tilewright.ir.numerics import evaluate
from tilewright.ir.random_numbers import ArrayTerms, random_key
from tilewright.tree.check.random_draws import DTYPES

_WORD = 1 << 64


if TYPE_CHECKING:

    class RandomFunction(Protocol):
        """A number in a kernel, an array where `shape=` or `out=` is given."""

        @overload
        def __call__(self, seed: float, *index: float, dtype: object = None) -> float: ...
        @overload
        def __call__(
            self, seed: float, *index: float, shape: int | Sequence[int], dtype: object = None, device: str | None = None, out: Any = None
        ) -> Any: ...  # fmt: skip
        @overload
        def __call__(self, seed: float, *index: float, dtype: object = None, device: str | None = None, out: Any) -> Any: ...


def _word(name: str) -> Callable[[Callable[..., Any]], RandomFunction]:
    """Mark a function as a word of kernels."""

    def mark(function: Callable[..., Any]) -> Any:
        function.__simt__ = f"random.{name}"  # type: ignore[attr-defined]
        return staticmethod(public(function))

    return mark


@public_methods("__call__")
class RandomFunctions:
    """Random numbers: Philox 4x32-10, by seed and index. docs/random.md has the law.

    In a kernel `tw.random.uniform(seed, i, j)` is a number. Outside, `shape=` or `out=` asks for an array; its numbers are those of a
    kernel that puts the element's place in row-major order after the indices.
    """

    __simt__ = "random"

    def __call__(self) -> NoReturn:
        raise UserError.at("TW005", "tw.random is no function", help="name one of its functions, as in tw.random.uniform(seed, shape=3)")

    @_word("uniform")
    def uniform(
        seed: float, *index: float, shape: int | Sequence[int] | None = None, dtype: object = None, device: str | None = None, out: Any = None
    ) -> Any:  # fmt: skip
        """Floats in [0, 1), at equal distances: f32 (24 bits), f64 (53), f16 (11) or bf16 (8)."""
        return _filled("uniform", seed, (), index, shape, dtype, device, out)

    @_word("normal")
    def normal(
        seed: float, *index: float, shape: int | Sequence[int] | None = None, dtype: object = None, device: str | None = None, out: Any = None
    ) -> Any:  # fmt: skip
        """Floats of the normal distribution with mean 0 and deviation 1: f32, f64, f16 or bf16."""
        return _filled("normal", seed, (), index, shape, dtype, device, out)

    @_word("randint")
    def randint(
        seed: float, low: float, high: float, *index: float, shape: int | Sequence[int] | None = None, dtype: object = None,
        device: str | None = None, out: Any = None,
    ) -> Any:  # fmt: skip
        """Integers from `low` on below `high`: i64, i32, u32 or u64."""
        return _filled("randint", seed, (low, high), index, shape, dtype, device, out)

    @_word("bits")
    def bits(
        seed: float, *index: float, shape: int | Sequence[int] | None = None, dtype: object = None, device: str | None = None, out: Any = None
    ) -> Any:  # fmt: skip
        """Integers all of whose bits are random: u32 or u64."""
        return _filled("bits", seed, (), index, shape, dtype, device, out)


random = RandomFunctions()
"""Random numbers by seed and index, in kernels and as arrays."""


# -- kernels --------------------------------------------------------------------------------------------------------
#
# `like` gives the extent and the dtype; it is the array that is written, and nothing is read from it.


@kernel
def _uniform(like: tw.Array, seed: int) -> tw.Array:
    out = tw.empty_like(like)
    for e in tw.grid(len(like)):
        out[e] = random.uniform(seed, e, dtype=like.dtype)
    return out


@kernel
def _uniform_at(like: tw.Array, key: int, high: int) -> tw.Array:
    out = tw.empty_like(like)
    for e in tw.grid(len(like)):
        out[e] = random.uniform(key, high, e, dtype=like.dtype)
    return out


@kernel
def _normal(like: tw.Array, seed: int) -> tw.Array:
    out = tw.empty_like(like)
    for e in tw.grid(len(like)):
        out[e] = random.normal(seed, e, dtype=like.dtype)
    return out


@kernel
def _normal_at(like: tw.Array, key: int, high: int) -> tw.Array:
    out = tw.empty_like(like)
    for e in tw.grid(len(like)):
        out[e] = random.normal(key, high, e, dtype=like.dtype)
    return out


@kernel
def _randint(like: tw.Array, seed: int, low: int, top: int) -> tw.Array:
    out = tw.empty_like(like)
    for e in tw.grid(len(like)):
        out[e] = random.randint(seed, low, top, e, dtype=like.dtype)
    return out


@kernel
def _randint_at(like: tw.Array, key: int, high: int, low: int, top: int) -> tw.Array:
    out = tw.empty_like(like)
    for e in tw.grid(len(like)):
        out[e] = random.randint(key, low, top, high, e, dtype=like.dtype)
    return out


@kernel
def _bits(like: tw.Array, seed: int) -> tw.Array:
    out = tw.empty_like(like)
    for e in tw.grid(len(like)):
        out[e] = random.bits(seed, e, dtype=like.dtype)
    return out


@kernel
def _bits_at(like: tw.Array, key: int, high: int) -> tw.Array:
    out = tw.empty_like(like)
    for e in tw.grid(len(like)):
        out[e] = random.bits(key, high, e, dtype=like.dtype)
    return out


_KERNELS: dict[str, tuple[Kernel[..., Any], Kernel[..., Any]]] = {
    "uniform": (_uniform, _uniform_at), "normal": (_normal, _normal_at), "randint": (_randint, _randint_at), "bits": (_bits, _bits_at),
}  # fmt: skip


# -- calls ----------------------------------------------------------------------------------------------------------


def _filled(
    name: str, seed: object, bounds: tuple[object, ...], index: Sequence[object], shape: Any, dtype: object, device: str | None, out: Any
) -> Any:  # fmt: skip
    where = f"tw.random.{name}"
    key = _checked(where, "seed", seed)
    places = [_checked(where, "index", i) for i in index]
    target = _target(where, name, shape, dtype, device, out)
    limits = _bounds(where, bounds, _dtype_of(where, name, target)) if bounds else ()
    *folded, high = places or [0]
    for place in folded:
        key = int(random_key(ArrayTerms(evaluate), _array(key), _array(place))[0])
    single, several = _KERNELS[name]
    flat, copied = _flattened(where, target)
    values = (np.uint64(key), np.uint64(high)) if places else (np.uint64(key),)
    if flat.shape[0]:
        keywords = {} if device is None else {"device": device}
        (several if places else single)(flat, *values, *limits, out=flat, **keywords)
    if copied:
        target[...] = flat.reshape(target.shape)
    return target


def _array(value: int) -> np.ndarray:
    return np.array([value], np.uint64)


def _checked(where: str, what: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise UserError.at("TW009", f"the {what} of {where} is {value!r}", help="it is a whole number from 0 on below 2^64")
    if not 0 <= int(value) < _WORD:
        raise UserError.at("TW013", f"the {what} of {where} is {int(value)}", help="it is at least 0 and below 2^64")
    return int(value)


def _bounds(where: str, bounds: tuple[object, ...], dtype: DType) -> tuple[np.generic, np.generic]:
    low, high = (b for b in bounds)
    for value in (low, high):
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise UserError.at("TW009", f"a bound of {where} is {value!r}", help="bounds are whole numbers")
    first, last = int(low), int(high)  # type: ignore[call-overload]
    if first >= last:
        raise UserError.at("TW016", f"{where} has no number from {first} on below {last}", help="high must be above low")
    # The bounds are passed as 64 bits: the last number of a 64-bit dtype cannot be reached.
    most = int(dtype.max_value) + (dtype.bits < 64)
    if first < int(dtype.min_value) or last > most:
        raise UserError.at("TW006", f"{where} of {dtype} takes bounds from {int(dtype.min_value)} to {most}, got {first} and {last}", help="ask for a wider dtype")
    wide = np.uint64 if dtype is u64 else np.int64
    return wide(first), wide(last)


def _dtype_of(where: str, name: str, array: Any) -> DType:
    kinds = DTYPES[f"random.{name}"]
    found = next((d for d in kinds if str(array.dtype) in (d.name, d.numpy.name, f"torch.{d.numpy.name}")), None)
    if found is None:
        raise UserError.at("TW006", f"{where} gives no {array.dtype}", help=f"choose one of {', '.join(map(str, kinds))}")
    return found


def _target(where: str, name: str, shape: Any, dtype: object, device: str | None, out: Any) -> Any:
    """The array to fill."""
    kinds = DTYPES[f"random.{name}"]
    if out is not None:
        found = _dtype_of(where, name, out)
        if dtype is not None and as_dtype(dtype) is not found:
            raise UserError.at("TW006", f"out= holds {found}, and dtype= is {as_dtype(dtype)}", help="leave dtype= out")
        if shape is not None and as_shape(shape) != tuple(out.shape):
            raise UserError.at("TW004", f"out= has shape {list(out.shape)}, and shape= is {list(as_shape(shape))}", help="leave shape= out")
        return out
    if shape is None:
        raise UserError.at("TW016", f"{where} needs shape= or out= outside of a kernel", help=f"write {where}(seed, shape=(rows, cols))")
    wanted = kinds[0] if dtype is None else as_dtype(dtype)
    if wanted not in kinds:
        raise UserError.at("TW006", f"{where} gives no {wanted}", help=f"choose one of {', '.join(map(str, kinds))}")
    place = find_device(default_device() if device is None else device)
    return allocate(as_shape(shape), wanted, place.id if array_device(place) is not None else "cpu")


def _flattened(where: str, array: Any) -> tuple[Any, bool]:
    """The array as one axis, and whether that is a copy to be copied back."""
    if len(array.shape) == 1:
        return array, False
    if isinstance(array, np.ndarray):
        if array.flags.c_contiguous:
            return array.reshape(-1), False
        return np.empty(array.size, array.dtype), True
    try:
        return (array.view(-1) if hasattr(array, "view") and not hasattr(array, "astype") else array.reshape(-1)), False
    except Exception as error:
        raise UserError.at("TW016", f"out= of {where} does not lie in one piece: {error}", help="give an array of one axis, or a contiguous one") from error


