"""What the test suites share: building loop-stage kernels by hand, running them at every stage and on the CPU, comparing.

`Spec` describes one kernel: its inputs, what one point computes, and an optional reduction. `program` turns it into a
`Program`; `run_stages` executes every stage of the IR in the emulator, `run_cpu` the machine code of this computer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import pytest

from tilewright.base.dtypes import DType, by_name, f32
from tilewright.base.sizes import Size
from tilewright.base.target import Target, host_cpu, parse_target
from tilewright.codegen.host.pool import pool_object, starter_object
from tilewright.codegen.host.spare_memory import spare_memory_object
from tilewright.compile.build import build_artifact
from tilewright.ir.build import Builder
from tilewright.ir.emulator import run_program
from tilewright.ir.nodes import Block, Kernel, Stage, Value
from tilewright.ir.program import KernelCall, Program, ProgramArray, ScalarInput
from tilewright.ir.types import Scalar, Tensor, tensor
from tilewright.passes.routes import Stages, lower
from tilewright.runtime.core import machine_code
from tilewright.runtime.cpu import pool as cpu_pool
from tilewright.runtime.cpu import program as cpu

cpu_pool.provide_code(lambda: pool_object(host_cpu()), lambda: starter_object(host_cpu()))
machine_code.provide("spare memory", lambda: spare_memory_object(host_cpu()))

Number = int | float | bool
PointBody = Callable[..., object]

CUDA = pytest.param("cuda", marks=pytest.mark.requires("cuda"))
"""A device of `parametrize` where a GPU is in reach."""


# -- building -------------------------------------------------------------------------------------------------------


def array(name: str, dtype: DType, *shape: int | str | Size, align: int = 0) -> Value:
    """A parameter: a row-major tensor."""
    return Value(tensor(dtype, *shape, align=align), name)


def strided(name: str, dtype: DType, shape: Sequence[int | str | Size], strides: Sequence[int | str | Size], align: int = 0) -> Value:
    """A parameter with strides of its own."""
    sizes = tuple(Size.of(s) for s in shape)
    return Value(Tensor(dtype, sizes, tuple(Size.of(s) for s in strides), "global", align), name)


def loop_kernel(
    name: str, params: Sequence[Value], extents: Sequence[int | str | Size], body: PointBody,
    facts: Mapping[str, int] | None = None, names: Sequence[str] = (),
) -> Kernel:  # fmt: skip
    """`parallel extents (indices) { body }`; the body appends what it likes and returns nothing."""
    b = Builder()
    bounds = [b.index(Size.of(e)) for e in extents]

    def region(inner: Builder, *indices: Value) -> Sequence[Value]:
        body(inner, *indices)
        return []

    b.parallel(bounds, region, names or ["i", "j", "k", "l"][: len(extents)])
    return Kernel(name, Stage.LOOP, tuple(params), Block((), tuple(b.ops)), facts=MappingProxyType(dict(facts or {})))


def program(kernel: Kernel, outputs: Sequence[str] = ("o",)) -> Program:
    """A program of one call; parameters named in `outputs` are its outputs, the rest its inputs."""
    inputs: list[ProgramArray | ScalarInput] = []
    results: list[ProgramArray] = []
    for param in kernel.params:
        if isinstance(param.type, Scalar):
            inputs.append(ScalarInput(param.name, param.type.dtype))
        elif isinstance(param.type, Tensor):
            is_output = param.name in outputs
            (results if is_output else inputs).append(ProgramArray(param.name, param.type, "output" if is_output else "input"))
    call = KernelCall(kernel, tuple(p.name for p in kernel.params))
    return Program(kernel.name, tuple(inputs), tuple(results), (), (call,))


def map_kernel(opcode: str, dtype: DType, count: int, facts: Mapping[str, int] | None = None) -> Kernel:
    """`o[i] = opcode(a[i], b[i]…)` over n elements."""
    params = [array(letter, dtype, "n", align=16) for letter in "abc"[:count]]
    output = array("o", dtype, "n", align=16)

    def body(b: Builder, i: Value) -> None:
        b.multi("store", output, i, b.op(opcode, *(b.op("load", p, i) for p in params)))

    return loop_kernel(opcode, [*params, output], ["n"], body, facts)


def cast_kernel(source: DType, targets: Sequence[DType]) -> Program:
    """`o_t[i] = cast(a[i], t)` for every target dtype t."""
    value = array("a", source, "n", align=16)
    outputs = [array(f"o_{t}", t, "n", align=16) for t in targets]

    def body(b: Builder, i: Value) -> None:
        loaded = b.op("load", value, i)
        for output, target in zip(outputs, targets, strict=True):
            b.multi("store", output, i, b.cast(loaded, target))

    return program(loop_kernel("casts", [value, *outputs], ["n"], body), [o.name for o in outputs])


def add_2d(dtype: DType = f32, align: int = 16, facts: Mapping[str, int] | None = None) -> Kernel:
    """`o = x + y` on matrices."""
    x, y, o = (array(n, dtype, "rows", "cols", align=align) for n in "xyo")

    def body(b: Builder, i: Value, j: Value) -> None:
        b.multi("store", o, i, j, b.add(b.op("load", x, i, j), b.op("load", y, i, j)))

    return loop_kernel("add_2d", [x, y, o], ["rows", "cols"], body, facts)


def scale_2d(dtype: DType = f32, facts: Mapping[str, int] | None = None) -> Kernel:
    """`o[i, j] = x[i, j] * v[j]`."""
    x, o = (array(n, dtype, "rows", "cols", align=16) for n in "xo")
    v = array("v", dtype, "cols", align=16)

    def body(b: Builder, i: Value, j: Value) -> None:
        b.multi("store", o, i, j, b.mul(b.op("load", x, i, j), b.op("load", v, j)))

    return loop_kernel("scale_2d", [x, v, o], ["rows", "cols"], body, facts)


def reduce_2d(kind: str = "add", axis: int = 1, dtype: DType = f32, facts: Mapping[str, int] | None = None) -> Kernel:
    """A reduction of a matrix along one axis."""
    x = array("x", dtype, "rows", "cols", align=16)
    arg = kind.startswith("arg")
    kept, reduced = ("rows", "cols") if axis == 1 else ("cols", "rows")
    o = array("o", by_name("i64") if arg else dtype, kept, align=16)

    def body(b: Builder, i: Value) -> None:
        def term(inner: Builder, k: Value) -> list[Value]:
            value = inner.op("load", x, *((i, k) if axis == 1 else (k, i)))
            return [value, k] if arg else [value]

        results = b.reduce(kind, [b.index(Size.of(reduced))], term, ["k"])
        b.multi("store", o, i, results[-1])

    return loop_kernel(f"{kind}_{axis}", [x, o], [kept], body, facts)


def reduce_all(kind: str = "add", dtype: DType = f32, facts: Mapping[str, int] | None = None) -> Kernel:
    """A reduction of a vector to one number."""
    x = array("x", dtype, "n", align=16)
    arg = kind.startswith("arg")
    o = array("o", by_name("i64") if arg else dtype)

    def body(b: Builder) -> None:
        def term(inner: Builder, k: Value) -> list[Value]:
            value = inner.op("load", x, k)
            return [value, k] if arg else [value]

        b.multi("store", o, b.reduce(kind, [b.index(Size.of("n"))], term, ["k"])[-1])

    return loop_kernel(f"{kind}_all", [x, o], [], body, facts)


# -- running --------------------------------------------------------------------------------------------------------

Inputs = Mapping[str, "np.ndarray | Number"]


def hints_of(whole: Program, inputs: Inputs) -> dict[str, int]:
    shapes = {n: v.shape for n, v in inputs.items() if isinstance(v, np.ndarray)}
    strides = {n: tuple(s // v.itemsize for s in v.strides) for n, v in inputs.items() if isinstance(v, np.ndarray)}
    return whole.sizes(shapes, strides)


def run_stages(whole: Program, inputs: Inputs, target: str | Target = "sm_90a") -> dict[str, dict[str, np.ndarray]]:
    """The outputs of the program as given and after each stage of lowering, executed by the emulator."""
    chosen = parse_target(target) if isinstance(target, str) else target
    stages = lower(whole, chosen, hints_of(whole, inputs))
    results = {"source": run_program(whole, inputs)}
    for stage in ("loop", "tile", "thread"):
        results[stage] = run_program(getattr(stages, stage), inputs)
    return results


def stages_of(kernel: Kernel, target: str = "sm_90a", outputs: Sequence[str] = ("o",), **hints: int) -> Stages:
    return lower(program(kernel, outputs), parse_target(target), hints)


def run_cpu(whole: Program, inputs: Inputs, target: Target | None = None) -> dict[str, np.ndarray]:
    """The outputs as this machine's code computes them."""
    chosen = target or host_cpu()
    stages = lower(whole, chosen, hints_of(whole, inputs))
    loaded = cpu.load(build_artifact(stages.thread, chosen))
    sizes = hints_of(whole, inputs)
    outputs = {
        a.name: np.full(tuple(s.evaluate(sizes) for s in a.type.shape), 0x5A, np.uint8).astype(a.type.dtype.numpy)
        if not a.type.shape
        else poison(tuple(s.evaluate(sizes) for s in a.type.shape), a.type.dtype)
        for a in whole.outputs
    }
    arrays = {n: v for n, v in inputs.items() if isinstance(v, np.ndarray)}
    numbers = {n: v for n, v in inputs.items() if not isinstance(v, np.ndarray)}
    loaded.run({**arrays, **outputs}, numbers)
    return outputs


def poison(shape: tuple[int, ...], dtype: DType) -> np.ndarray:
    """Memory that holds nothing sensible, so that an element nobody wrote is seen."""
    count = int(np.prod(shape)) if shape else 1
    fill = 1 if dtype.is_bool else 0x5A
    return np.full(count * dtype.itemsize, fill, np.uint8).view(dtype.numpy).reshape(shape)


def ptx_of(stages: Stages, target: str = "sm_90a") -> str:
    return build_artifact(stages.thread, parse_target(target)).code.decode()


# -- data and comparison --------------------------------------------------------------------------------------------


def data(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType, scale: float = 2.0) -> np.ndarray:
    """Random values that suit the dtype."""
    if dtype.is_bool:
        return rng.integers(0, 2, shape).astype(np.bool_)
    if dtype.is_int:
        low, high = (0, 100) if dtype.kind == "u" else (-100, 100)
        return rng.integers(low, high, shape).astype(dtype.numpy)
    return (rng.standard_normal(shape) * scale).astype(dtype.numpy)


def as_wide(value: object) -> np.ndarray:
    """Floats as f64, everything else as it is."""
    result = np.asarray(value)
    return result if result.dtype.kind in "biu" else result.astype(np.float64)


def epsilon(dtype: DType) -> float:
    """The spacing of numbers just above 1."""
    return float(2.0**-dtype.mantissa) if dtype.is_float else 0.0


def assert_close(got: object, want: object, dtype: DType, ulp: float = 4.0, scale: object = None, label: str = "") -> None:
    """Equal for integers; for floats within `ulp` units of the dtype, relative to the value or to `scale` where that is more.

    NaN meets NaN, an infinity itself; what overflows the dtype meets its infinity.
    """
    found, wanted = as_wide(got), as_wide(want)
    assert found.shape == wanted.shape, f"{label}: shape {found.shape}, expected {wanted.shape}"
    if not dtype.is_float:
        different = np.argwhere(found != wanted)
        assert not len(different), f"{label}: {len(different)} of {found.size} differ, first at {_at(found, wanted, different)}"
        return
    with np.errstate(all="ignore"):
        rounded = wanted.astype(dtype.numpy).astype(np.float64)
        size = np.abs(wanted) if scale is None else np.maximum(np.abs(wanted), np.abs(np.asarray(scale, np.float64)))
        tiny = float(np.finfo(dtype.numpy).smallest_subnormal) if dtype.bits > 16 else 2.0**-24
        allowed = ulp * np.maximum(size * epsilon(dtype), tiny)
        same = (found == rounded) | (np.isnan(found) & np.isnan(rounded))
        bad = ~same & ~(np.abs(found - wanted) <= allowed)
    different = np.argwhere(bad)
    assert not len(different), f"{label}: {len(different)} of {found.size} differ, first at {_at(found, wanted, different)}"


def _at(found: np.ndarray, wanted: np.ndarray, places: np.ndarray) -> str:
    where = tuple(places[0])
    return f"{tuple(map(int, where))}: got {found[where]!r}, expected {wanted[where]!r}"


# -- object files ----------------------------------------------------------------------------------------------------


def undefined_symbols(code: bytes) -> set[str]:
    """The names an ELF object (64 bits, little-endian) expects others to define."""
    assert code[:6] == b"\x7fELF\x02\x01"
    table, entry_size, count = (
        int.from_bytes(code[0x28:0x30], "little"), int.from_bytes(code[0x3A:0x3C], "little"), int.from_bytes(code[0x3C:0x3E], "little"),
    )  # fmt: skip
    sections = [code[table + k * entry_size : table + (k + 1) * entry_size] for k in range(count)]

    def word(section: bytes, offset: int, size: int = 8) -> int:
        return int.from_bytes(section[offset : offset + size], "little")

    names: set[str] = set()
    for section in sections:
        if word(section, 4, 4) != 2:  # SHT_SYMTAB
            continue
        strings = word(sections[word(section, 0x28, 4)], 0x18)
        start, size = word(section, 0x18), word(section, 0x20)
        for place in range(start + 24, start + size, 24):
            symbol = code[place : place + 24]
            if word(symbol, 6, 2) == 0:  # SHN_UNDEF
                begin = strings + word(symbol, 0, 4)
                names.add(code[begin : code.index(b"\0", begin)].decode())
    return names
