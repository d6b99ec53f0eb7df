"""WGSL as text: every kernel of the table, the gallery's schedules for a GPU without warps, and Tint's opinion of all of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import tilewright as tw
from kernel_table import CASES, Case
from tilewright.base.artifact import Artifact
from tilewright.base.errors import TargetLimit
from tilewright.base.target import Target, parse_target
from tilewright.compile.build import build_artifact
from tilewright.compile.driver import compile_kernel
from tilewright.compile.primitives import finished_program
from tilewright.primitives.sort import SortPlan
from tilewright.primitives.threads.sort import threads_sort_program
from tint import absence, problem

WGSL = parse_target("wgsl")


def compiled(kernel: tw.Kernel, *arguments: object, target: Target = WGSL) -> Artifact:
    """The kernel's WGSL for these arguments."""
    runner = kernel.runner
    given = runner.arguments(kernel.bound(*arguments), True)
    return compile_kernel(kernel.function, runner.signature(given, True), target)


def text_of(kernel: tw.Kernel, *arguments: object, target: Target = WGSL) -> str:
    return compiled(kernel, *arguments, target=target).code.decode()


@tw.kernel
def add(x: tw.Array, y: tw.Array) -> tw.Array:
    n = x.shape[0]
    out = tw.empty((n,), x.dtype)
    for i in tw.grid(n):
        out[i] = x[i] + y[i]
    return out


@tw.kernel
def squares(x: tw.Array) -> tw.Array:
    n = x.shape[0]
    out = tw.empty((n,), tw.i64)
    for i in tw.grid(n):
        out[i] = x[i] + i * i
    return out


@pytest.mark.requires("tint")
@pytest.mark.parametrize("case", CASES[::5], ids=lambda case: case.name)
def test_tint_takes_the_table(case: Case) -> None:
    arguments = case.inputs(np.random.default_rng(0), case.shapes[-1])
    try:
        text = text_of(case.kernel, *arguments)
    except TargetLimit as error:
        text = f"// {error.diagnostics[0].message}"
        assert "f64" in text
    assert not problem(text)


def test_numbers_of_a_word_are_plain() -> None:
    text = text_of(add, *[np.ones(33, np.float32)] * 2)
    assert "tw_add64" not in text
    assert "var<storage, read_write> k0_a2: array<f32>" in text


def test_arrays_are_of_vectors_where_only_vectors_are_written() -> None:
    """33 elements end inside a vector, whose rest is nobody's to write; reading one element of a vector harms nobody."""
    odd, even = (text_of(add, *[np.ones(count, np.float32)] * 2) for count in (33, 64))
    assert "var<storage, read> k0_a0: array<vec4<f32>>" in odd and "] = vec4" not in odd
    assert "var<storage, read_write> k0_a2: array<vec4<f32>>" in even
    narrow = text_of(add, *[np.ones(64, np.int8)] * 2)
    assert "vec4" not in narrow


def test_narrow_elements_lie_in_words() -> None:
    text = text_of(add, *[np.ones(33, np.int8)] * 2)
    assert "array<atomic<u32>>" in text
    assert "atomicAnd" in text
    assert "atomicOr" in text


def test_f16_is_elements_of_its_own_where_a_device_has_it() -> None:
    half = replace(WGSL, features=WGSL.features | {"f16"}, soft_casts=WGSL.soft_casts - {"f16"})
    text = text_of(add, *[np.ones(33, np.float16)] * 2, target=half)
    assert text.startswith("enable f16;")
    assert "var<storage, read_write> k0_a2: array<f16>" in text and "atomic" not in text
    assert "f32(" in text and "tw_to_f16(" in text
    assert "f16" not in text_of(add, *[np.ones(33, np.float16)] * 2)
    assert "enable" not in text_of(add, *[np.ones(33, np.float32)] * 2, target=half)
    complaint = "" if absence() else problem(text)
    assert not complaint or "extension 'f16' is not allowed in the current environment" in complaint


def test_a_square_of_an_index_has_64_bits() -> None:
    artifact = compiled(squares, np.ones(33, np.int64))
    text = artifact.code.decode()
    assert "tw_mul64" in text
    assert "array<vec2<u32>>" in text
    (launch,) = artifact.launches
    assert launch.narrow
    assert all(size.evaluate(dict.fromkeys(size.names, 1 << 31)) >= 1 << 31 for size in launch.narrow)


def test_f64_is_refused_at_its_line() -> None:
    with pytest.raises(TargetLimit, match="wgsl cannot take 'x' of add: it has no f64") as caught:
        text_of(add, *[np.ones(3)] * 2)
    assert caught.value.diagnostics[0].span.line


def test_a_kernel_of_several_calls_is_written_once() -> None:
    """A sort has eight passes of three launches; those between the first and the last are the same kernels."""
    program = threads_sort_program(SortPlan(tw.f32, None, False, False, False, False))
    artifact = build_artifact(finished_program(program, WGSL), WGSL)
    entries = [launch.entry for launch in artifact.launches]
    assert len(entries) == 24
    assert len({*entries}) == artifact.code.decode().count("@compute") == 7
    assert entries[3:6] == entries[6:9]
