"""The words of the kernel languages, each declared once.

A row has a word's signature, its documentation, the kinds of kernels that know it and the ops it builds in explicit kernels.
From the rows come the Python functions of these names (`python_words`), the stubs that editors and type checkers read and
docs/explicit-kernels-instructions.md (both by `tools/words.py --write`), and the names and defaults that the explicit front end
reads arguments by (`frontend.simt.words`). Words with members (`thread.x`, `grid`, `Array`) are classes: `objects`.

To add a word: a row here, and what it builds, in `frontend/simt/words*.py` or `tree/check/expressions.py`.
"""

from __future__ import annotations

import ast
import functools
from dataclasses import replace

from tilewright.base.record import record

KERNEL, EXPLICIT = frozenset({"kernel"}), frozenset({"explicit"})
BOTH = KERNEL | EXPLICIT


@record
class WordRow:
    """One word."""

    name: str
    signature: str
    """As Python writes it: parameters with types and defaults, and the result."""
    doc: str
    kinds: frozenset[str] = EXPLICIT
    """`kernel`: `@tilewright.kernel` and its relatives; `explicit`: `@tilewright.gpu` and `@tilewright.cpu`."""
    ops: str = ""
    """The ops it builds in explicit kernels, where the documentation names them."""
    overloads: tuple[str, ...] = ()
    """Signatures for type checkers, where one does not say it all."""
    explicit: str = ""
    """The signature in explicit kernels, where it is another."""
    offered: bool = True
    """Whether `tilewright` has a function of that name from here. It has none for Python's builtins and for words it offers as something else."""


@record
class Section:
    """Words that are documented together; those without a heading are in docs/python.md."""

    heading: str
    text: str
    rows: tuple[WordRow, ...]


def parameters(signature: str) -> tuple[tuple[str, str], ...]:
    """The parameters of a signature, each with its default as text ("" where it has none)."""
    function = ast.parse(f"def word{signature}: ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    defaults = [*[""] * (len(names) - len(arguments.defaults)), *map(ast.unparse, arguments.defaults)]
    many = [(f"*{arguments.vararg.arg}", "")] if arguments.vararg else []
    named = zip((a.arg for a in arguments.kwonlyargs), ("" if d is None else ast.unparse(d) for d in arguments.kw_defaults), strict=True)
    return (*zip(names, defaults, strict=True), *many, *named)


@functools.cache
def explicit_parameters(name: str) -> tuple[tuple[str, ...], int]:
    """The names of a word's parameters in explicit kernels, and how many of them must be given."""
    found = parameters(WORDS[name].explicit or WORDS[name].signature)
    return tuple(n for n, _ in found), sum(not default for _, default in found)


_SHAPE = "shape: int | tuple[int, ...]"
_AXIS = "axis: int | tuple[int, ...]"


def _elementwise(name: str, doc: str, kinds: frozenset[str] = BOTH) -> WordRow:
    """A function of a number that maps arrays too."""
    overloads = ("(x: float) -> float", "(x: Array) -> Array")
    return WordRow(name, "(x: float | Array) -> float | Array", doc, kinds, overloads=overloads)


def _complex_too(name: str, doc: str) -> WordRow:
    """One of these that takes complex numbers as well."""
    row = _elementwise(name, doc)
    return replace(row, overloads=(*row.overloads, "(x: builtins.complex) -> builtins.complex"))


def _of_two(name: str, doc: str) -> WordRow:
    """A function of two numbers that maps arrays too."""
    overloads = ("(a: float, b: float) -> float", "(a: Array, b: Array | float) -> Array", "(a: float, b: Array) -> Array")
    return WordRow(name, "(a: float | Array, b: float | Array) -> float | Array", doc, BOTH, overloads=overloads, explicit="(*numbers)")


def _pair(name: str, first: str, second: str, doc: str) -> WordRow:
    """A function of two numbers with names of their own that maps arrays too."""
    overloads = (
        f"({first}: float, {second}: float) -> float", f"({first}: Array, {second}: Array | float) -> Array", f"({first}: float, {second}: Array) -> Array",
    )  # fmt: skip
    return WordRow(name, f"({first}: float | Array, {second}: float | Array) -> float | Array", doc, BOTH, overloads=overloads)


def _reduction(name: str, doc: str, result: str = "float", explicit: str = "", op: str = "") -> WordRow:
    """A function of an array along an axis, several, or all."""
    overloads = (f"({op}x: Array) -> {result}", f"({op}x: Array, {_AXIS}, keepdims: bool = False) -> Array")
    kinds = BOTH if explicit else KERNEL
    return WordRow(name, f"({op}x: Array, {_AXIS} | None = None, keepdims: bool = False) -> {result} | Array", doc, kinds, overloads=overloads, explicit=explicit)


def _warp(name: str, first: str, result: str, doc: str, op: str) -> WordRow:
    return WordRow(name, f"({first}, lanes: int | None = None) -> {result}", doc, ops=op)


def _shuffle(name: str, second: str, doc: str, overloads: tuple[str, ...] = ()) -> WordRow:
    signature = f"(value: float, {second}: int, width: int | None = None, lanes: int | None = None) -> float"
    return WordRow(name, signature, doc, ops="shuffle", overloads=overloads)


def _atomic(kind: str, doc: str, number: str = "float", expected: str = "") -> WordRow:
    order = 'scope: str = "device", order: str = "relaxed", rank: int | None = None'
    signature = f"(array: Any, index: Index, {expected}value: {number}, {order}) -> {number}"
    return WordRow(f"atomic_{kind}", signature, doc, ops="atomic atomic_remote")


def _fast(name: str, doc: str, op: str) -> WordRow:
    return WordRow(name, "(x: float) -> float", f"{doc}, f32, by the device's own instruction: quick, and less exact.", ops=op)


SECTIONS = (
    Section("", "", (
        WordRow("empty", f"({_SHAPE}, dtype: AnyDType) -> Array", "A new array to be written and returned.", KERNEL),
        WordRow("zeros", f"({_SHAPE}, dtype: AnyDType | None = None) -> Array",
                "A new array of zeros; inside a loop a tile of zeros, which needs no dtype.", KERNEL),
        WordRow("ones", f"({_SHAPE}, dtype: AnyDType | None = None) -> Array",
                "A new array of ones; inside a loop a tile of ones, which needs no dtype.", KERNEL),
        WordRow("full", f"({_SHAPE}, value: float, dtype: AnyDType | None = None) -> Array",
                "A new array of one value; inside a loop a tile of it, which needs no dtype.", KERNEL),
        WordRow("empty_like", "(array: Array) -> Array", "A new array of the same shape and dtype.", KERNEL),
        WordRow("zeros_like", "(array: Array) -> Array", "A new array of zeros of the same shape and dtype.", KERNEL),
        WordRow("barrier", "() -> None",
                "What stands before it in the loop is done for all elements of shared arrays. In an explicit kernel: `gpu_sync()`.", BOTH),
        WordRow("dot", "(a: Array | float, b: Array | float) -> float", "The sum of products of two vectors: rows or slices of arrays.", KERNEL),
        WordRow("matmul", "(a: Array | float, b: Array | float) -> Array", "`a @ b`", KERNEL),
        WordRow("transpose", "(x: Array) -> Array", "The axes in reverse order.", KERNEL),
        WordRow("reshape", "(x: Array, shape: int | tuple[int, ...]) -> Array",
                "The same elements under another shape; one extent may be -1. It is no copy. `x.reshape(a, b)` is the same.", KERNEL),
        WordRow("row_max", "(x: Array) -> Array", "The largest element of each row, as a column.", KERNEL),
        WordRow("row_min", "(x: Array) -> Array", "The smallest element of each row, as a column.", KERNEL),
        WordRow("row_sum", "(x: Array) -> Array", "The sum of each row, as a column.", KERNEL),
        WordRow("unrolled", "(values: range) -> range", "`for i in tw.unrolled(range(4)):` has the body four times, with a constant for i."),
    )),
    Section("", "", (
        WordRow("cast", "(value: float, dtype: AnyDType) -> float", "The value converted to a dtype.", BOTH),
        WordRow("bitcast", "(x: float, dtype: AnyDType) -> float", "The same bits as another type of the same size.", BOTH, ops="bitcast"),
        WordRow("where", "(condition: bool, a: float, b: float) -> float", "a where the condition holds, else b.", BOTH),
        WordRow("fma", "(a: float, b: float, c: float) -> float", "a*b + c with one rounding.", BOTH),
        WordRow("clamp", "(x: float, low: float, high: float) -> float", "x kept between low and high.", BOTH),
        _complex_too("exp", "e to the x."),
        _elementwise("exp2", "2 to the x."),
        _complex_too("log", "Natural logarithm."),
        _elementwise("log2", "Logarithm to base 2."),
        _elementwise("sin", "Sine, radians."),
        _elementwise("cos", "Cosine, radians."),
        _elementwise("tan", "Tangent, radians."),
        _elementwise("tanh", "Hyperbolic tangent."),
        _elementwise("sinh", "Hyperbolic sine."),
        _elementwise("cosh", "Hyperbolic cosine."),
        _elementwise("erf", "Error function."),
        _elementwise("exp10", "10 to the x."),
        _elementwise("expm1", "exp(x) - 1, also near 0."),
        _elementwise("log10", "Logarithm to base 10."),
        _elementwise("log1p", "log(1 + x), also near 0."),
        _elementwise("asin", "Inverse sine, radians."),
        _elementwise("acos", "Inverse cosine, radians."),
        _elementwise("atan", "Inverse tangent, radians."),
        _elementwise("asinh", "Inverse hyperbolic sine."),
        _elementwise("acosh", "Inverse hyperbolic cosine."),
        _elementwise("atanh", "Inverse hyperbolic tangent."),
        _elementwise("cbrt", "Cube root, also of negative numbers."),
        _elementwise("erfc", "1 - erf(x), also where that is tiny."),
        _elementwise("lgamma", "Logarithm of the size of the gamma function."),
        _elementwise("tgamma", "Gamma function."),
        _pair("atan2", "y", "x", "The angle of the point (x, y), from -pi to pi."),
        _pair("hypot", "x", "y", "sqrt(x*x + y*y) without overflow on the way."),
        _pair("fmod", "a", "b", "The remainder of a / b, exact, with the sign of a; that of % has the sign of b."),
        _pair("copysign", "x", "y", "The size of x with the sign of y."),
        _pair("nextafter", "x", "y", "The number next to x on the way to y."),
        _pair("ldexp", "x", "n", "x times 2 to the n, for an integer n, rounded once."),
        WordRow("frexp", "(x: float) -> tuple[float, int]", "`m, e = tw.frexp(x)`: x is m times 2 to the e, and m is from 1/2 to 1.", BOTH),
        _elementwise("sign", "-1, 0 or 1; NaN for NaN."),
        _complex_too("sqrt", "Square root."),
        _elementwise("rsqrt", "1 / sqrt(x)."),
        _elementwise("sigmoid", "1 / (1 + exp(-x))."),
        _elementwise("floor", "Round down."),
        _elementwise("ceil", "Round up."),
        _elementwise("trunc", "Round to zero."),
        _elementwise("round", "The nearest integer, halves to even."),
        _elementwise("relu", "max(x, 0)."),
        _elementwise("silu", "x * sigmoid(x).", KERNEL),
        _elementwise("gelu", "GELU, tanh form.", KERNEL),
        _elementwise("softplus", "log(1 + exp(x)).", KERNEL),
        _elementwise("abs", "The absolute value."),
        WordRow("pow", "(a: float | Array, b: float | Array) -> float | Array", "a to the b.", BOTH,
                overloads=("(a: float, b: float) -> float", "(a: Array, b: Array | float) -> Array")),
        WordRow("complex", "(re: float | Array, im: float | Array = 0.0) -> Any", "The complex number of these parts: complex64 of f32, complex128 of f64.", KERNEL),
        WordRow("conj", "(z: Any) -> Any", "The complex number with the sign of its imaginary part turned.", KERNEL),
        WordRow("real", "(z: Any) -> Any", "The real part: z.real.", KERNEL),
        WordRow("imag", "(z: Any) -> Any", "The imaginary part: z.imag.", KERNEL),
        WordRow("isnan", "(x: float) -> bool", "Whether x is NaN.", BOTH),
        WordRow("isinf", "(x: float) -> bool", "Whether x is infinite.", BOTH),
        WordRow("isfinite", "(x: float) -> bool", "Whether x is neither infinite nor NaN.", BOTH),
        WordRow("rotate_left", "(x: int, n: int) -> int", "The bits of x moved up by n, those that leave coming in below.", BOTH),
        WordRow("rotate_right", "(x: int, n: int) -> int", "The bits of x moved down by n, those that leave coming in above.", BOTH),
        _of_two("minimum", "The smaller; NaN if either is."),
        _of_two("maximum", "The larger; NaN if either is."),
        WordRow("rsqrt_approx", "(x: float) -> float",
                "1 / sqrt(x) by the device's own instruction: f32 only, to two bits or so, denormals are zero."),
        WordRow("int", "(x: float) -> int", "Towards zero.", offered=False),
        WordRow("float", "(x: float) -> float", "A float of the kernel's default type, which takes the dtype of what it meets.", offered=False),
        WordRow("bool", "(x: float) -> bool", "Whether it is not zero.", offered=False),
        WordRow("len", "(x: Array) -> int", "The extent of an array's first axis, or the items of a tuple.", offered=False),
    )),
    Section("", "", (
        _reduction("reduce", "All elements combined by `op`, one of + * min max and or argmin argmax, over an axis, several, or all.", op="op: str, "),
        _reduction("sum", "Sum over an axis, several, or all."),
        _reduction("prod", "Product over an axis, several, or all."),
        _reduction("min", "Smallest element over an axis, several, or all.", explicit="(*numbers)"),
        _reduction("max", "Largest element over an axis, several, or all.", explicit="(*numbers)"),
        _reduction("all", "Whether all are true, over an axis, several, or all.", "bool"),
        _reduction("any", "Whether any is true, over an axis, several, or all.", "bool"),
        _reduction("mean", "The mean over an axis, several, or all."),
        _reduction("var", "The mean square of what elements are away from their mean, over an axis, several, or all."),
        _reduction("std", "The root of `var`."),
        _reduction("median", "The median over an axis, several, or all: of an even number of elements the mean of the middle two, computed in f64."),
        _reduction("norm", "The root of the sum of squares over an axis, several, or all."),
        _reduction("argmin", "Index of the smallest element over an axis, several, or all.", "int"),
        _reduction("argmax", "Index of the largest element over an axis, several, or all.", "int"),
    )),
    Section("Indices", "", (
        WordRow("gpu_thread_id", "() -> int", "The thread's number in the whole grid.", ops="thread_id program_id"),
        WordRow("lane_id", "() -> int", "The thread's number in its warp, from 0.", ops="thread_id"),
        WordRow("warp_id", "() -> int", "The number of the thread's warp in its block.", ops="thread_id"),
        WordRow("lane_mask", '(relation: str = "lt") -> int',
                "A bit for each lane whose number is in that relation (lt, le, eq, ge, gt) to this thread's.", ops="lane_mask"),
        WordRow("active_mask", "() -> int", "A bit for each lane of the warp that is here now.", ops="active_mask"),
    )),
    Section("Synchronisation", "", (
        WordRow("gpu_sync", "() -> None", "Every thread of the block arrives before any leaves; what they wrote is seen by all after.",
                ops="barrier", offered=False),
        WordRow("barrier_count", "(predicate: object) -> int",
                "A barrier of the block that tells every thread in how many of them the predicate holds.", ops="barrier_reduce"),
        WordRow("barrier_and", "(predicate: object) -> bool",
                "A barrier of the block that tells every thread whether the predicate holds in all of them.", ops="barrier_reduce"),
        WordRow("barrier_or", "(predicate: object) -> bool",
                "A barrier of the block that tells every thread whether the predicate holds in any of them.", ops="barrier_reduce"),
        WordRow("named_barrier", "(number: int, threads: int) -> None",
                "Barrier 1 to 15 of the block among that many of its threads, whole warps: each arrives before any leaves.", ops="named_barrier"),
        WordRow("named_arrive", "(number: int, threads: int) -> None", "Arrive at such a barrier without waiting.", ops="named_barrier"),
        WordRow("warp_sync", "(lanes: int | None = None) -> None",
                "Every thread of the warp arrives before any leaves; what they wrote is seen by all of them after.", ops="warp_sync"),
        WordRow("fence", '(scope: str = "device") -> None',
                "Accesses before it are seen before those after it: at scope thread, block, cluster, device or system.", ops="fence"),
        WordRow("grid_sync", "() -> None", "Every thread of the grid arrives before any leaves; all blocks must run at once.", ops="grid_barrier"),
        WordRow("elect", "() -> bool", "True in one thread of the warp, which must come as a whole.", ops="elect"),
        WordRow("wait_previous", "() -> None", "Wait for the kernel launched before, where this one may start before its end.", ops="wait_previous"),
        WordRow("release_next", "() -> None", "The kernel launched next may start.", ops="release_next"),
    )),
    Section("Warps", "`lanes` is a mask of the lanes that take part, the same in all of them; without it all lanes of the warp must come.", (
        _shuffle("shuffle", "lane", "The value of another lane of the warp; within groups of `width` lanes its number wraps.",
                 ("(value: int, lane: int, width: int | None = None, lanes: int | None = None) -> int",
                  "(value: float, lane: int, width: int | None = None, lanes: int | None = None) -> float")),
        _shuffle("shuffle_up", "delta", "The value of the lane `delta` below; the lowest of a group keep their own."),
        _shuffle("shuffle_down", "delta", "The value of the lane `delta` above; the highest of a group keep their own."),
        _shuffle("shuffle_xor", "mask", "The value of the lane whose number differs in these bits."),
        _warp("vote_any", "predicate: object", "bool", "Whether the predicate holds in any lane of the warp.", "vote"),
        _warp("vote_all", "predicate: object", "bool", "Whether the predicate holds in all lanes of the warp.", "vote"),
        _warp("vote_uniform", "predicate: object", "bool", "Whether the predicate is the same in all lanes of the warp.", "vote"),
        _warp("ballot", "predicate: object", "int", "A bit for each lane of the warp: whether the predicate holds there.", "vote"),
        _warp("match_any", "value: Any", "int", "A bit for each lane of the warp: whether it has the same value.", "match"),
        _warp("match_all", "value: Any", "tuple[int, bool]", "The lanes if all of them have the same value, else 0; and whether they do.", "match"),
        _warp("redux_add", "value: Any", "int", "The sum over the warp, of 32-bit integers, by one instruction.", "redux"),
        _warp("redux_min", "value: Any", "int", "The least over the warp, of 32-bit integers, by one instruction.", "redux"),
        _warp("redux_max", "value: Any", "int", "The greatest over the warp, of 32-bit integers, by one instruction.", "redux"),
        _warp("redux_and", "value: Any", "int", "The bitwise and over the warp, of 32-bit integers, by one instruction.", "redux"),
        _warp("redux_or", "value: Any", "int", "The bitwise or over the warp, of 32-bit integers, by one instruction.", "redux"),
        _warp("redux_xor", "value: Any", "int", "The bitwise xor over the warp, of 32-bit integers, by one instruction.", "redux"),
    )),
    Section("Memory", "", (
        WordRow("shared", f"({_SHAPE}, dtype: AnyDType | None = None, align: int = 16) -> Array",
                "An array that the threads of a block share, at a multiple of `align` bytes. In a loop of a kernel: an array that each iteration "
                "has for itself.", BOTH, "alloc", explicit=f"({_SHAPE}, dtype: AnyDType, align: int = 16)"),
        WordRow("shared_dynamic", "(dtype: AnyDType) -> Any", "The shared memory that the launch asked for, as an array of one axis.", ops="alloc"),
        WordRow("local", f"({_SHAPE}, dtype: AnyDType) -> Any", "An array that each thread has for itself.", ops="alloc"),
        WordRow("vload", "(array: Any, index: Index, width: int = 1, cache: str | None = None) -> Any",
                "An element, or a tuple of neighbours; `cache` says how caches treat it.", ops="load"),
        WordRow("vstore", "(array: Any, index: Index, value: Any, cache: str | None = None) -> None",
                "Write an element, or a tuple of neighbours.", ops="store"),
        WordRow("prefetch", "(array: Any, index: Index) -> None",
                "That element will be needed soon; it may lie outside the array.", ops="prefetch"),
    )),
    Section("Atomics", "On i16, u16, i32, u32, i64, u64, f16, bf16, f32 and f64, in global and shared memory; bitwise kinds, `inc` and `dec` on integers. "
            "Of floats, `min` and `max` give NaN where either is NaN. A tuple of 2 or 4 f32 (2, 4 or 8 f16 or bf16) is added to neighbours in global "
            "memory, each on its own. With `rank` the shared memory of another block of the cluster is meant.", (
        _atomic("add", "Add in one step for all threads; gives the old value."),
        _atomic("sub", "Subtract in one step for all threads; gives the old value."),
        _atomic("min", "Keep the smaller in one step for all threads; gives the old value."),
        _atomic("max", "Keep the larger in one step for all threads; gives the old value."),
        _atomic("and", "Bitwise and in one step for all threads; gives the old value.", "int"),
        _atomic("or", "Bitwise or in one step for all threads; gives the old value.", "int"),
        _atomic("xor", "Bitwise exclusive or in one step for all threads; gives the old value.", "int"),
        _atomic("exchange", "Put a value there; gives the old one."),
        _atomic("cas", "Put a value there if the old one is as expected; gives the old one.", expected="expected: float, "),
        _atomic("inc", "One more, or 0 where the old value is `value` or above; gives the old one.", "int"),
        _atomic("dec", "One less, or `value` where the old one is 0 or above `value`; gives the old one.", "int"),
        WordRow("atomic_load", '(array: Any, index: Index, order: str = "relaxed", scope: str = "device", width: int = 1) -> Any',
                "One access that is made where it stands, every time.", ops="atomic_load"),
        WordRow("atomic_store", '(array: Any, index: Index, value: Any, order: str = "relaxed", scope: str = "device") -> None',
                "Write an element, or neighbours of 128 bits at most, as one.", ops="atomic_store"),
    )),
    Section("Bits", "", (
        WordRow("popcount", "(x: int) -> int", "How many bits are 1.", BOTH, ops="popcount"),
        WordRow("clz", "(x: int) -> int", "How many bits above the highest 1 are 0; all of them for 0.", BOTH, ops="clz"),
        WordRow("ctz", "(x: int) -> int", "How many bits below the lowest 1 are 0; all of them for 0.", ops="ctz"),
        WordRow("ffs", "(x: int) -> int", "The place of the lowest 1, counted from 1; 0 for 0.", ops="ctz"),
        WordRow("brev", "(x: int) -> int", "The bits in reverse order.", ops="brev"),
        WordRow("byte_perm", "(a: Any, b: Any, selector: int) -> int",
                "Four of the eight bytes of b and a, by the nibbles of the selector.", ops="byte_perm"),
        WordRow("funnel_left", "(low: int, high: int, n: int) -> int",
                "The upper word of high:low shifted left by n modulo 32.", ops="funnel_shift"),
        WordRow("funnel_right", "(low: int, high: int, n: int) -> int",
                "The lower word of high:low shifted right by n modulo 32.", ops="funnel_shift"),
        WordRow("mul_high", "(a: Any, b: Any) -> int", "The upper half of the product of two integers of 32 or 64 bits.", ops="mul_high"),
        WordRow("dp4a", "(a: Any, b: Any, c: Any) -> int",
                "c plus the products of the four bytes of a and b, signed where the word is i32.", ops="dp4a"),
        WordRow("pack_bits", "(values: Any, dtype: AnyDType) -> int",
                "Two 16-bit or four 8-bit numbers as one u32, the first lowest.", ops="pack to_bits"),
        WordRow("unpack_bits", "(word: int, dtype: AnyDType) -> Fragment",
                "A u32 as a tuple of two 16-bit or four 8-bit numbers.", ops="from_bits extract"),
    )),
    Section("Fast functions", "The functions of [python.md](python.md#functions) work in explicit kernels too, with the bounds that are given there.", (
        _fast("fast_exp", "e^x", "exp2_approx"),
        _fast("fast_exp2", "2^x", "exp2_approx"),
        _fast("fast_log", "log(x)", "log2_approx"),
        _fast("fast_log2", "log2(x)", "log2_approx"),
        _fast("fast_sin", "sin(x)", "sin_approx"),
        _fast("fast_cos", "cos(x)", "cos_approx"),
        _fast("fast_sqrt", "sqrt(x)", "sqrt_approx"),
        _fast("fast_rsqrt", "1 / sqrt(x)", "rsqrt_approx"),
        _fast("fast_rcp", "1 / x", "rcp_approx"),
        _fast("fast_tanh", "tanh(x)", "tanh_approx"),
        WordRow("fast_divide", "(a: Any, b: Any) -> float",
                "a / b, f32, by the device's own instructions: quick, and less exact; 0 where b is above 2^126.", ops="div_approx"),
    )),
    Section("Time", "", (
        WordRow("clock", "() -> int", "A counter of the multiprocessor's cycles, of 64 bits.", ops="clock"),
        WordRow("clock32", "() -> int", "Its lower 32 bits.", ops="clock"),
        WordRow("global_timer", "() -> int", "Nanoseconds, the same clock on all multiprocessors.", ops="global_timer"),
        WordRow("nanosleep", "(ns: int) -> None", "Do nothing for about that many nanoseconds, at most a million.", ops="nanosleep"),
    )),
    Section("Telling the host", "", (
        WordRow("print", '(*values: object, sep: str = " ", end: str = "\\n") -> None',
                "Texts, numbers, tuples and f-strings; a GPU's output comes when the host next waits for it.", ops="print", offered=False),
    )),
    Section("Asynchronous copies", "`at` is the index of the first element in shared memory. A kernel must wait for every copy before it ends.", (
        WordRow("copy_async", "(to: Any, at: Index, source: Any, index: Index, count: int = 1, where: object = True, cache: str | None = None, "
                "prefetch: int = 0) -> None", "Start copying 4, 8 or 16 bytes to shared memory.", ops="copy_async"),
        WordRow("copy_commit", "() -> None", "Close the thread's group of `copy_async`.", ops="copy_commit"),
        WordRow("copy_wait", "(pending: int = 0) -> None",
                "Wait until at most `pending` of the thread's groups of `copy_async` are unfinished.", ops="copy_wait"),
        WordRow("bulk_load", "(to: Any, at: Index, source: Any, index: Index, count: int, barriers: Any, i: int) -> None",
                "Start copying neighbours to shared memory; their bytes count on the mbarrier.", ops="bulk_load"),
        WordRow("bulk_store", "(source: Any, at: Index, to: Any, index: Index, count: int) -> None",
                "Start copying neighbours from shared memory, as part of the thread's open group.", ops="bulk_store"),
        WordRow("tensor_map", "(array: Any, box: tuple[int, ...], swizzle: int = 0) -> Any",
                "How the copy engine sees an array: the box one copy moves, and how its rows are swizzled.", ops="tensor_map"),
        WordRow("tma_load", "(to: Any, at: Index, map: Any, index: Index, barriers: Any, i: int) -> None",
                "Start copying the box there into shared memory; its bytes count on the mbarrier.", ops="tma_load"),
        WordRow("tma_store", "(source: Any, at: Index, map: Any, index: Index) -> None",
                "Start copying a box from shared memory, as part of the thread's open group.", ops="tma_store"),
        WordRow("bulk_commit", "() -> None", "Close the thread's group of bulk and tensor stores.", ops="tma_commit"),
        WordRow("bulk_wait", "(pending: int = 0, read: bool = False) -> None",
                "Wait until at most `pending` of the thread's groups of stores are unfinished, or have been `read`.", ops="tma_wait"),
        WordRow("fence_async", "() -> None",
                "What this thread wrote to shared memory is seen by the copy engine and matrix units.", ops="fence_async"),
    )),
    Section("Mbarriers", "A phase of an mbarrier ends when all expected arrivals and bytes have come; then the next begins.", (
        WordRow("mbarriers", "(n: int) -> Any", "n barriers in shared memory that count arrivals and copied bytes.", ops="alloc"),
        WordRow("mbarrier_init", "(barriers: Any, i: int, count: int) -> None",
                "Make it one that expects `count` arrivals in every phase; by one thread, before a barrier.", ops="mbarrier_init"),
        WordRow("fence_init", "() -> None", "Initialised mbarriers are seen by the whole cluster and the copy engine.", ops="fence_init"),
        WordRow("mbarrier_arrive", "(barriers: Any, i: int, rank: int | None = None) -> None",
                "Arrive, here or in the block of the cluster with that rank.", ops="mbarrier_arrive"),
        WordRow("mbarrier_expect", "(barriers: Any, i: int, bytes: int) -> None",
                "Arrive, and expect that many bytes to be copied in this phase.", ops="mbarrier_expect"),
        WordRow("mbarrier_wait", "(barriers: Any, i: int, parity: int) -> None",
                "Wait until the phase of that parity has ended: 0 waits for the first.", ops="mbarrier_wait"),
    )),
    Section("Clusters", "`@tw.gpu(cluster=2)`: so many neighbouring blocks along x run at once. `tw.cluster.rank` is a block's number in its cluster, "
            "`tw.cluster.size` how many there are.", (
        WordRow("cluster_sync", "() -> None", "Every thread of the cluster arrives before any leaves.", ops="cluster_sync"),
        WordRow("load_remote", "(array: Any, index: Index, rank: int) -> Any",
                "An element of the same shared memory in the block of the cluster with that rank.", ops="load_remote"),
        WordRow("store_remote", "(array: Any, index: Index, rank: int, value: Any) -> None",
                "Write an element of the same shared memory in the block with that rank.", ops="store_remote"),
    )),
    Section("Tensor cores", "A fragment is a tuple of numbers in the registers of a warp. Along the sum it has 16 elements of f16 or bf16, 8 of f32 (used "
            "as tf32), 32 of i8, u8, f8e4m3 or f8e5m2. The words `wmma_…` are for the shapes of CUDA's WMMA: m16n16k16, m32n8k16 and m8n32k16 of f16 (from sm_75 on), bf16, "
            "i8 and u8, m16n16k8 of f32. Where the elements of such a fragment lie is not said, as in CUDA; it knows its shape and dtype. Matrices may have any strides.", (
        WordRow("fragment_a", "(array: Any, index: Index, transposed: bool = False) -> Fragment",
                "16 rows of a first factor, from row and column `index` of a matrix on (or of its transpose).", ops="load to_bits"),
        WordRow("fragment_b", "(array: Any, index: Index, transposed: bool = False) -> Fragment",
                "16 columns of a second factor, from row and column `index` of a matrix on (or of its transpose).", ops="load to_bits"),
        WordRow("fragment_c", "(value: Any = 0.0, dtype: AnyDType = f32) -> Fragment",
                "16 x 16 sums that all begin as that number: f32, or i32 for sums of integers."),
        WordRow("fragment_mma", "(a: Any, b: Any, c: Any, dtype: AnyDType) -> Fragment",
                "c plus the product of a and b, whose elements have that dtype; gives the new sums.", ops="mma"),
        WordRow("fragment_load", "(array: Any, index: Index) -> Fragment",
                "16 x 16 sums from row and column `index` of a matrix of f32 or i32 on.", ops="load"),
        WordRow("fragment_store", "(array: Any, index: Index, c: Any) -> None",
                "Write 16 x 16 sums to a matrix, from row and column `index` on, rounded to its dtype.", ops="store"),
        WordRow("wmma_load", "(array: Any, index: Index, part: str, shape: str = \"m16n16k16\", transposed: bool = False) -> Fragment",
                "The part a (m x k), b (k x n) or c (m x n) of a product, from row and column `index` of a matrix on (or of its transpose).", ops="load to_bits"),
        WordRow("wmma_fill", "(value: Any = 0.0, shape: str = \"m16n16k16\", dtype: AnyDType = f32) -> Fragment",
                "m x n sums that all begin as that number: f32, or i32 for sums of integers."),
        WordRow("wmma_mma", "(a: Any, b: Any, c: Any) -> Fragment", "c plus the product of a and b; gives the new sums.", ops="mma"),
        WordRow("wmma_store", "(array: Any, index: Index, c: Any, transposed: bool = False) -> None",
                "Write m x n sums to a matrix (or to its transpose), from row and column `index` on, rounded to its dtype.", ops="store"),
        WordRow("mma_sync", "(a: Any, b: Any, c: Any, dtype: AnyDType) -> Fragment",
                "One matrix instruction of the warp, 16 x 8: four words of a, two of b, four sums.", ops="mma"),
        WordRow("ldmatrix", "(array: Any, index: Index, count: int = 4, trans: bool = False) -> Fragment",
                "8 x 8 matrices of 16-bit elements; lane l gives the place of row l % 8 of matrix l // 8.", ops="ldmatrix"),
        WordRow("stmatrix", "(array: Any, index: Index, words: Any, trans: bool = False) -> None",
                "The reverse of `ldmatrix`, for one, two or four words.", ops="stmatrix"),
        WordRow("wgmma", "(a: Any, a_index: Index, b: Any, b_index: Index, sums: Any, n: int, steps: int = 1) -> Fragment",
                "Four warps start adding a 64 x k tile of a times a k x n tile of b, rows swizzled.", ops="wgmma"),
        WordRow("wgmma_wait", "(sums: Any, pending: int = 0) -> Fragment",
                "Wait until at most `pending` groups of `wgmma` are unfinished; gives the sums.", ops="wgmma_wait"),
        WordRow("set_registers", "(count: int, direction: str) -> None",
                "Give registers back ('decrease') or take more ('increase'): so many for each thread of the warp group.", ops="set_registers"),
    )),
)  # fmt: skip

WORDS = {row.name: row for section in SECTIONS for row in section.rows}
