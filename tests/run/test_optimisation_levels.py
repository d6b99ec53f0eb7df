"""Every optimisation level computes the same, and each means something that its code shows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from click.testing import CliRunner

import tilewright as tw
from kernel_table import CASES
from tilewright.base import levels
from tilewright.base.artifact import Artifact
from tilewright.base.errors import TargetLimit, UserError
from tilewright.base.target import host_cpu
from tilewright.cli.main import cli
from tilewright.execute.kernel import Kernel

OTHERS = tuple(name for name in levels.LEVELS if name != levels.DEFAULT)
SOURCE = """
import tilewright as tw

@tw.kernel
def scaled(x: tw.Array, at: tw.Array) -> tw.Array:
    (n,) = x.shape
    out = tw.empty((n,), x.dtype)
    for i in tw.grid(n):
        left = x[i - 1] if i > 0 else x[i]
        out[i] = tw.exp(left) + x[at[i]]
    return out
"""
NAMED = ("add_matrices f32", "blur f32", "gather", "scaled_sum", "newton", "softmax", "matrix_product", "normalised", "transpose", "variance")


def softmax(x: tw.Array) -> tw.Array:
    rows, cols = x.shape
    out = tw.empty((rows, cols), x.dtype)
    for i in tw.grid(rows):
        e = tw.exp(x[i, :] - tw.max(x[i, :]))
        out[i, :] = e / tw.sum(e)
    return out


def gelu(x: tw.Array, y: tw.Array) -> tw.Array:
    (n,) = x.shape
    out = tw.empty((n,), x.dtype)
    for i in tw.grid(n):
        out[i] = tw.tanh(x[i]) * y[i] + 1.0
    return out


def _at(function: Callable[..., object], level: str) -> Kernel[..., object]:
    return tw.kernel(optimize=level)(function)


def _compiled(function: Callable[..., object], level: str, *arguments: object, target: str = "cpu") -> Artifact:
    return _at(function, level).compile(*arguments, target=target)


VECTOR, MATRIX = np.linspace(-3, 3, 999, dtype=np.float32), np.linspace(-4, 4, 31 * 77, dtype=np.float32).reshape(31, 77)


@pytest.mark.parametrize("level", OTHERS)
@pytest.mark.parametrize("case", [c for c in CASES if c.name.startswith(NAMED)][:14], ids=lambda case: case.name)
def test_kernels_of_the_table_are_right_at_every_level(case: object, level: str) -> None:
    with levels.given(level):
        case.kernel.forget_programs()  # type: ignore[attr-defined]
        try:
            for shape in case.shapes:  # type: ignore[attr-defined]
                case.check("cpu", shape)  # type: ignore[attr-defined]
        finally:
            case.kernel.forget_programs()  # type: ignore[attr-defined]


@pytest.mark.parametrize("level", OTHERS)
def test_the_bits_are_the_same_at_every_level(level: str) -> None:
    assert _at(gelu, level)(VECTOR, VECTOR).tobytes() == _at(gelu, "O2")(VECTOR, VECTOR).tobytes()
    own, default = _at(softmax, level)(MATRIX), _at(softmax, "O2")(MATRIX)
    if level == "Os":  # its vectors are narrower, so that sums are added up in another order
        np.testing.assert_allclose(own, default, rtol=1e-6)
    else:
        assert own.tobytes() == default.tobytes()


def test_levels_are_kept_apart_and_say_what_they_are() -> None:
    found = {level: _compiled(gelu, level, VECTOR, VECTOR) for level in levels.LEVELS}
    assert len({artifact.key for artifact in found.values()}) == len(found)
    assert {level: artifact.level for level, artifact in found.items()} == {level: level for level in found}
    assert _compiled(gelu, "", VECTOR, VECTOR).level == "O2"


def test_code_grows_and_shrinks_with_the_level() -> None:
    size = {level: len(_compiled(softmax, level, MATRIX).code) for level in levels.LEVELS}
    # Instructions of AVX-512 are longer, and edges under a mask are short at every level.
    assert size["O0"] > (1.5 if host_cpu().has_lane_masks else 2) * size["O2"]
    assert size["Os"] < size["O2"] < size["O3"]


def test_small_code_takes_one_register_to_a_step() -> None:
    small, default = _compiled(gelu, "Os", VECTOR, VECTOR), _compiled(gelu, "O2", VECTOR, VECTOR)
    width = int(default.schedule.partition("vector=")[2].partition(",")[0])
    assert f"vector={width // 4}" in small.schedule or f"vector={width // 2}" in small.schedule


def _assembly(tmp_path: object, *options: str) -> str:
    path = f"{tmp_path}/kernels.py"
    with open(path, "w", encoding="utf-8") as file:
        file.write(SOURCE)
    found = CliRunner().invoke(cli, ["compile", path, "--args", "x=f32[*] at=i64[*]", *options])
    assert found.exit_code == 0, found.output
    return found.output


def test_low_latency_code_is_aligned_and_asks_for_its_arrays(tmp_path: object) -> None:
    text = _assembly(tmp_path, "--target", "aarch64-neon", "--optimize", "Olatency")
    assert text.count("prfm") >= 3 and "p2align\t6" in text
    plain = _assembly(tmp_path, "--target", "aarch64-neon")
    assert "prfm" not in plain and "p2align\t6" not in plain
    assert "align = 64" in _assembly(tmp_path, "--stage", "thread", "--optimize", "Olatency")


def test_inspect_says_which_checks_are_proven_away_and_why(tmp_path: object) -> None:
    _assembly(tmp_path)
    found = CliRunner().invoke(cli, ["inspect", f"{tmp_path}/kernels.py", "--target", "cpu", "--args", "x=f32[*] at=i64[*]", "--optimize", "O1"])
    assert found.exit_code == 0, found.output
    assert "optimised as O1" in found.output
    assert "no check, since i < n and i >= 1" in found.output
    assert "no check, since i >= 0 and i < n" in found.output
    assert found.output.count("checked as the kernel runs") == 1


@pytest.mark.requires("ptxas")
def test_levels_on_a_gpu() -> None:
    from tilewright.codegen.nvptx import ptxas

    code = {level: _compiled(softmax, level, MATRIX, target="sm_90a").code for level in levels.LEVELS}
    assert code["O0"] != code["O2"] and code["O1"] != code["O2"]
    assert all(code[level] == code["O2"] for level in ("O3", "Os", "Olatency"))
    assert ptxas.assemble(code["O0"].decode(), "sm_90a") and ptxas.assemble(code["O1"].decode(), "sm_90a")


def test_strict_kernels_refuse_a_level_that_does_nothing() -> None:
    wanted = tw.kernel(optimize="Os", strict=True)(gelu)
    assert wanted.compile(VECTOR, VECTOR).level == "Os"
    with pytest.raises(TargetLimit, match=r"@optimize\(Os\)"):
        wanted.compile(VECTOR, VECTOR, target="sm_90a")


@pytest.mark.parametrize("level", OTHERS)
def test_explicit_kernels_have_levels(level: str) -> None:
    @tw.gpu(optimize=level)
    def doubled(x: tw.Array, y: tw.Array):
        i = tw.gpu_thread_id()
        if i < y.size:
            y[i] = x[i] * 2.0

    @tw.cpu(optimize=level)
    def total(x: tw.Array, y: tw.Array):
        s = 0.0
        for i in range(x.size):
            s += x[i]
        y[0] = s

    result, one = np.zeros_like(VECTOR), np.zeros(1, np.float32)
    tw.gpu_launch(doubled, VECTOR.size, 64, VECTOR, result, device="cpu")
    assert (result == VECTOR * 2).all()
    total(VECTOR, one)
    assert abs(float(one[0])) < 1e-3
    assert doubled.last is not None and doubled.last.level == level
    assert ("prfm" in total.assembly(VECTOR, one) or "prefetch" in total.assembly(VECTOR, one)) is (level == "Olatency")


BLOCKS = """
pipeline both(x) {{
    let a = compute(x) {{
        @kernel elementwise
        @optimize({0})
        for i in 0..len {{ out[i] = x[i] * 2.0 }}
    }}
    return compute(a) {{
        @kernel elementwise
        @optimize({1})
        for i in 0..len {{ out[i] = a[i] + 1.0 }}
    }}
}}
let b = both(x)
"""


def test_blocks_of_a_program_share_one_level() -> None:
    program = tw.load(BLOCKS.format("Os", "Os"))
    np.testing.assert_array_equal(program.run(x=VECTOR)["b"], VECTOR * 2 + 1)
    with pytest.raises(UserError, match=r"different levels: @optimize\(Os\).*@optimize\(O1\)"):
        tw.load(BLOCKS.format("Os", "O1")).run(x=VECTOR)
    with pytest.raises(UserError, match="@optimize takes one of"):
        tw.load(BLOCKS.format("Os", "fast")).run(x=VECTOR)


def test_run_takes_a_level(tmp_path: object) -> None:
    _assembly(tmp_path)
    np.save(f"{tmp_path}/x.npy", VECTOR)
    np.save(f"{tmp_path}/at.npy", np.arange(VECTOR.size)[::-1].copy())
    shown = [
        CliRunner().invoke(cli, ["run", f"{tmp_path}/kernels.py", "--in", f"x={tmp_path}/x.npy", "--in", f"at={tmp_path}/at.npy", "--device", "cpu", *more])
        for more in ([], ["--optimize", "O0"])
    ]  # fmt: skip
    assert shown[0].exit_code == 0 and shown[0].output == shown[1].output, shown
