"""Element types: what an array holds and what an operation computes with.

A `DType` is a value, compared by identity (there is exactly one of each). `promote` gives the type of `a op b`;
`accumulator` the type a sum is carried in; `loses` says whether a conversion can lose data.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class FixedArray:
    """An array whose shape is known when code is compiled: `tw.f64[64]`. `element` is a dtype, or a class of state objects."""

    element: Any
    shape: tuple[int, ...]

    def __repr__(self) -> str:
        name = self.element.name if isinstance(self.element, DType) else self.element.__name__
        return f"{name}[{', '.join(map(str, self.shape))}]"

    def __call__(self) -> None:
        """Type checkers take what can be called for a type."""
        raise TypeError(f"{self!r} describes an array; make one with NumPy")


def checked_shape(shape: object) -> tuple[int, ...]:
    """A shape as it is written in brackets. Raises `TypeError` for what is none."""
    parts = shape if isinstance(shape, tuple) else (shape,)
    if not parts or any(isinstance(p, bool) or not isinstance(p, int) or p < 1 for p in parts):
        raise TypeError(f"a shape is one or more whole numbers from 1 on, got {shape!r}")
    return parts


def fixed(element: Any, *shape: int) -> FixedArray:
    """`tw.fixed(tw.f64, 64)`: the same as `tw.f64[64]`, for type checkers too: `Annotated[np.ndarray, tw.fixed(tw.f64, 64)]`."""
    if not isinstance(element, DType):
        raise TypeError(f"a fixed array has a dtype such as tw.f64, got {element!r}")
    return FixedArray(element, checked_shape(shape))


@dataclass(frozen=True, eq=False)
class DType:
    """One element type. `kind` is 'b' bool, 'i' signed, 'u' unsigned, 'f' float, 'c' complex, 'q' packed quantised block."""

    name: str
    kind: str
    bits: int
    mantissa: int = 0
    llvm: str = ""
    block: int = 1
    """Elements per storage unit: 1 but for quantised blocks."""
    block_bytes: int = 0
    scale: str = ""
    """Of packed groups: the dtype of their scale, by name."""
    zero_point: bool = False
    """Whether packed groups have a zero point of their own."""

    def __repr__(self) -> str:
        return self.name

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return by_name, (self.name,)

    @property
    def itemsize(self) -> int:
        """Bytes of one storage unit (of one block for quantised types)."""
        return self.block_bytes or max(1, self.bits // 8)

    @property
    def is_float(self) -> bool:
        return self.kind == "f"

    @property
    def is_int(self) -> bool:
        return self.kind in "iu"

    @property
    def is_signed(self) -> bool:
        return self.kind in "if"

    @property
    def is_bool(self) -> bool:
        return self.kind == "b"

    @property
    def is_complex(self) -> bool:
        """A pair of floats, the real part first. Kernels compute with the two."""
        return self.kind == "c"

    @property
    def is_inexact(self) -> bool:
        """A float, or a complex number."""
        return self.kind in "fc"

    @property
    def part(self) -> DType:
        """Of a complex type: that of its parts. Else the type itself."""
        return self if self.kind != "c" else f32 if self.bits == 64 else f64

    @property
    def is_packed(self) -> bool:
        """Blocks of quantised numbers: an element is a f32 that is computed from its block."""
        return self.kind == "q"

    @property
    def element(self) -> DType:
        """What an element is when it is read: f32 of packed blocks, else the type itself."""
        return f32 if self.kind == "q" else self

    @property
    def is_small_float(self) -> bool:
        """A float narrower than f32: stored as such, computed in f32."""
        return self.kind == "f" and self.bits < 32

    def __getitem__(self, shape: int | tuple[int, ...]) -> FixedArray:
        """`tw.f64[64]`: an array of that many elements, as a field of a `tw.State` or a parameter of a critical function."""
        return FixedArray(self, checked_shape(shape))

    __iter__ = None
    """Subscripts are shapes: there is nothing to walk through."""

    def __call__(self, value: float | str | bytes) -> Any:
        """In a kernel: a conversion. Elsewhere: a NumPy number of this type, which a launch takes as it is."""
        if isinstance(value, str | bytes):
            # The NumPy types of narrow floats end the process on text.
            value = float(value) if self.is_float else int(value)
        return self.numpy.type(value)

    @cached_property
    def numpy(self) -> np.dtype:
        """The NumPy dtype with the same storage."""
        dtype: np.dtype = np.dtype((np.void, self.block_bytes)) if self.kind == "q" else np.dtype(_NUMPY[self.name])
        return dtype

    @property
    def min_value(self) -> int | float | bool:
        """The identity of max: -inf, False or the smallest integer."""
        if self.is_float:
            return float("-inf") if self is not f8e4m3 else -448.0
        if self.is_bool:
            return False
        return -(1 << (self.bits - 1)) if self.kind == "i" else 0

    @property
    def max_value(self) -> int | float | bool:
        """The identity of min: +inf, True or the largest integer."""
        if self.is_float:
            return float("inf") if self is not f8e4m3 else 448.0
        if self.is_bool:
            return True
        return (1 << (self.bits - (self.kind == "i"))) - 1


_NUMPY: dict[str, type] = {
    "bool": np.bool_, "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64,
    "u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64,
    "f16": np.float16, "f32": np.float32, "f64": np.float64,
    "complex64": np.complex64, "complex128": np.complex128, "bf16": ml_dtypes.bfloat16, "f8e4m3": ml_dtypes.float8_e4m3fn, "f8e5m2": ml_dtypes.float8_e5m2,
}  # fmt: skip

bool_ = DType("bool", "b", 8, llvm="i1")
i8 = DType("i8", "i", 8, llvm="i8")
i16 = DType("i16", "i", 16, llvm="i16")
i32 = DType("i32", "i", 32, llvm="i32")
i64 = DType("i64", "i", 64, llvm="i64")
u8 = DType("u8", "u", 8, llvm="i8")
u16 = DType("u16", "u", 16, llvm="i16")
u32 = DType("u32", "u", 32, llvm="i32")
u64 = DType("u64", "u", 64, llvm="i64")
f16 = DType("f16", "f", 16, 10, "half")
bf16 = DType("bf16", "f", 16, 7, "bfloat")
f32 = DType("f32", "f", 32, 23, "float")
f64 = DType("f64", "f", 64, 52, "double")
f8e4m3 = DType("f8e4m3", "f", 8, 3, "i8")
f8e5m2 = DType("f8e5m2", "f", 8, 2, "i8")
complex64 = DType("complex64", "c", 64)
complex128 = DType("complex128", "c", 128)
q4_0 = DType("q4_0", "q", 4, block=32, block_bytes=18)
q4_1 = DType("q4_1", "q", 4, block=32, block_bytes=20)
q5_0 = DType("q5_0", "q", 5, block=32, block_bytes=22)
q5_1 = DType("q5_1", "q", 5, block=32, block_bytes=24)
q8_0 = DType("q8_0", "q", 8, block=32, block_bytes=34)
q4_k = DType("q4_k", "q", 4, block=256, block_bytes=144)
q5_k = DType("q5_k", "q", 5, block=256, block_bytes=176)
q6_k = DType("q6_k", "q", 6, block=256, block_bytes=210)

ALL: tuple[DType, ...] = (
    bool_, i8, i16, i32, i64, u8, u16, u32, u64, f16, bf16, f32, f64, f8e4m3, f8e5m2, q4_0, q8_0, q4_k, q5_k, q6_k,
    q4_1, q5_0, q5_1,
)  # fmt: skip
GROUP_BLOCKS = (16, 32, 64, 128, 256)
"""Elements that packed groups may have."""


def _group(bits: int, block: int, scale: DType, zero_point: bool) -> DType:
    """Groups lie as scale, zero point (as wide as the scale, so that all is aligned), numbers."""
    name = f"q{bits}_g{block}_{scale.name}{'_z' if zero_point else ''}"
    size = (2 if zero_point else 1) * scale.itemsize + block * bits // 8
    return DType(name, "q", bits, block=block, block_bytes=size, scale=scale.name, zero_point=zero_point)


GROUPS: tuple[DType, ...] = tuple(
    _group(bits, block, scale, zero_point) for bits in (4, 8) for block in GROUP_BLOCKS for scale in (f16, f32) for zero_point in (False, True)
)
"""Groups of 4 or 8 bits with one scale each, the numbers as ONNX's `MatMulNBits` has them."""
SCALARS: tuple[DType, ...] = tuple(d for d in ALL if d.kind != "q")
COMPLEX: tuple[DType, ...] = (complex64, complex128)
"""Types of kernels' numbers and of arrays, of which compiled code sees the parts: a complex array is one of floats, with one more axis of extent 2."""

_ALIASES = {
    "float": "f32", "float32": "f32", "float64": "f64", "double": "f64", "float16": "f16", "half": "f16",
    "bfloat16": "bf16", "int": "i64", "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64",
    "uint8": "u8", "uint16": "u16", "uint32": "u32", "uint64": "u64", "bool_": "bool",
    "float8_e4m3fn": "f8e4m3", "float8_e5m2": "f8e5m2", "fp8": "f8e4m3", "e4m3": "f8e4m3", "e5m2": "f8e5m2",
}  # fmt: skip
_BY_NAME = {d.name: d for d in (*ALL, *COMPLEX, *GROUPS)}
_BY_NUMPY = {d.numpy: d for d in SCALARS}


def by_name(name: str) -> DType:
    """The dtype of that name or alias; `KeyError` when there is none."""
    return _BY_NAME[_ALIASES.get(name, name)]


def is_name(name: str) -> bool:
    return _ALIASES.get(name, name) in _BY_NAME


def from_numpy(dtype: np.dtype) -> DType | None:
    """Our dtype for a NumPy one, or None where there is none (complex, object, other byte order…)."""
    return _BY_NUMPY.get(dtype)


def complex_from_numpy(dtype: np.dtype) -> DType | None:
    """Our complex dtype for a NumPy one, or None where it is something else."""
    return next((d for d in COMPLEX if d.numpy == dtype and dtype.isnative), None)


def of_array(dtype: np.dtype) -> DType | None:
    """Our dtype for that of a NumPy array, complex ones too; None where there is none."""
    return _BY_NUMPY.get(dtype) or complex_from_numpy(dtype)


def complex_of(dtype: DType) -> DType:
    """The complex type whose parts hold such numbers: complex64 for floats of up to 32 bits, else complex128."""
    return dtype if dtype.is_complex else complex64 if dtype.is_float and dtype.bits <= 32 else complex128


def promote(a: DType, b: DType) -> DType | None:
    """The type of `a op b`; None where every choice would lose data (mixing u64 with a signed integer, f16 with bf16)."""
    if a is b:
        return a
    if a.kind == "q" or b.kind == "q":
        return None
    if a.is_bool:
        return b
    if b.is_bool:
        return a
    if a.is_complex or b.is_complex:
        part = promote(a.part, b.part)
        return None if part is None else complex_of(part)
    if a.is_float and b.is_float:
        wide, narrow = (a, b) if a.bits > b.bits else (b, a)
        return None if wide.bits == narrow.bits else wide
    if a.is_float or b.is_float:
        number, integer = (a, b) if a.is_float else (b, a)
        return number if number.mantissa + 1 >= integer.bits - (integer.kind == "i") else None
    if a.kind == b.kind:
        return a if a.bits > b.bits else b
    signed, unsigned = (a, b) if a.kind == "i" else (b, a)
    if signed.bits > unsigned.bits:
        return signed
    wider = {8: i16, 16: i32, 32: i64}
    return wider.get(unsigned.bits)


def loses(source: DType, target: DType) -> bool:
    """Whether some value of `source` cannot be held by `target` even approximately (float rounding is not a loss)."""
    if source is target or source.is_bool:
        return False
    if target.is_bool or target.kind == "q" or source.kind == "q":
        return True
    if source.is_complex or target.is_complex:
        return not target.is_complex or loses(source.part, target.part)
    if source.is_float:
        return not target.is_float
    if target.is_float:
        return False
    if source.kind == target.kind:
        return target.bits < source.bits
    return source.kind == "i" or target.bits <= source.bits


def accumulator(dtype: DType) -> DType:
    """What a sum or product of such elements is carried in: f32 for small floats, i64/u64 for integers and bool."""
    if dtype.is_small_float:
        return f32
    if dtype.is_bool or dtype.kind == "i":
        return i64
    if dtype.kind == "u":
        return u64
    return dtype


def compute_dtype(dtype: DType) -> DType:
    """What arithmetic on such elements is done in: f32 for small floats, else the type itself."""
    return f32 if dtype.is_small_float else dtype


def arithmetic_dtype(dtype: DType) -> DType:
    """What exact functions of such elements (size, sign, comparison) are computed in: f32 for floats of 8 bits, which no device compares."""
    return f32 if dtype.is_float and dtype.bits == 8 else dtype
