"""SPIR-V for OpenCL and Vulkan: our assembler against `spirv-as`, modules against `spirv-val`, and what is refused."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import tilewright as tw
from gallery_cases import CONTRACTION_CASES, GALLERY_CASES
from tilewright.base.dtypes import f32
from tilewright.base.errors import TargetLimit
from tilewright.base.target import PORTABLE
from tilewright.cli.main import cli
from tilewright.codegen.spirv.assembler import NAMES, OPCODES, assemble, float_bits, float_text
from tilewright.compile.build import llvm_text
from tilewright.compile.driver import compile_stages
from tilewright.compile.primitives import finished_program
from tilewright.primitives.cpu_buckets import bucket_sort_program
from tilewright.primitives.sort import SortPlan

CASES = {case.name: case for case in (*GALLERY_CASES, *CONTRACTION_CASES)}
ENVIRONMENTS = {"spirv-opencl": "opencl1.2", "spirv-vulkan": "vulkan1.2"}
GALLERY = Path(__file__).parents[3] / "examples" / "gallery.py"
needs_tools = pytest.mark.skipif(not shutil.which("spirv-val"), reason="spirv-tools is not installed")


def validate(code: bytes, target: str, folder: Path, environment: str = "") -> None:
    path = folder / "module.spv"
    path.write_bytes(code)
    done = subprocess.run(["spirv-val", "--target-env", environment or ENVIRONMENTS[target], str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_tools
@pytest.mark.parametrize("target", ENVIRONMENTS)
@pytest.mark.parametrize("name", ["gelu", "transpose", "mean_and_variance", "best_columns", "any_set", "matmul f16", "conv2d"])
def test_modules_are_valid(name: str, target: str, tmp_path: Path) -> None:
    case = CASES[name]
    validate(case.kernel.compile(*case.arguments(1000), target=target).code, target, tmp_path)


@needs_tools
@pytest.mark.parametrize("target", ENVIRONMENTS)
def test_the_listing_is_what_other_assemblers_read(target: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["compile", str(GALLERY), "--kernel", "silu", "--target", target, "--args", "x=f32[*]"])
    assert done.exit_code == 0, done.output
    listing = tmp_path / "module.spvasm"
    text = done.output[done.output.index("; SPIR-V") :]
    listing.write_text(text)
    version = "spv1.0" if target == "spirv-opencl" else "spv1.5"
    subprocess.run(["spirv-as", "--target-env", version, "--preserve-numeric-ids", str(listing), "-o", str(tmp_path / "theirs.spv")], check=True)
    (tmp_path / "ours.spv").write_bytes(assemble(text))
    plain = [
        subprocess.run(["spirv-dis", "--no-header", "--raw-id", str(tmp_path / name)], capture_output=True, text=True, check=True).stdout
        for name in ("ours.spv", "theirs.spv")
    ]
    ops = [[line.split(" = ")[-1].split()[0] for line in one.splitlines()] for one in plain]
    assert ops[0] == ops[1]
    validate((tmp_path / "ours.spv").read_bytes(), target, tmp_path)


@needs_tools
@pytest.mark.parametrize("name", ["gelu", "matmul"])
def test_llvm_functions_by_name_and_long_vectors(name: str, tmp_path: Path) -> None:
    """A CPU whose driver takes SPIR: what LLVM has as an instruction is no call of a library, and vectors fill registers."""
    case = CASES[name]
    target = replace(PORTABLE["spirv-opencl"], max_threads=1, max_local=1 << 20, vector_bytes=64, features=PORTABLE["spirv-opencl"].features | {"spir"})
    kernel, runner = case.kernel, case.kernel.runner
    arguments = runner.arguments(kernel.bound(*case.arguments(4096)), True)
    program = compile_stages(kernel.function, runner.signature(arguments, True), target).stages.thread
    text, _ = llvm_text(program, target)
    assert 'LinkageAttributes "llvm.fma.v16f32" Import' in text and " fma " not in text
    validate(assemble(text), "spirv-opencl", tmp_path)


@needs_tools
def test_arrays_of_a_thread_lie_as_their_vectors_say(tmp_path: Path) -> None:
    """Vectors are written at multiples of 64 bytes: the array must begin at one, else a CPU with such registers stops the process."""
    plain = PORTABLE["spirv-opencl"]
    target = replace(plain, max_threads=1, max_local=1 << 20, vector_bytes=64, features=plain.features | {"spir"})
    text, _ = llvm_text(finished_program(bucket_sort_program(SortPlan(f32)), target), target)
    own = re.findall(r"^(%\S+) = OpVariable \S+ Function", text, re.M)
    aligned = dict(re.findall(r"^OpDecorate (%\S+) Alignment (\d+)", text, re.M))
    assert own and all(int(aligned[name]) >= 64 for name in own)
    assert re.search(r"Aligned 64$", text, re.M)
    validate(assemble(text), "spirv-opencl", tmp_path)


@needs_tools
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_f16_where_a_device_has_it(name: str, tmp_path: Path) -> None:
    plain = PORTABLE[name]
    target = replace(plain, features=plain.features | {"f16", "f16.denormals"}, soft_casts=plain.soft_casts - {"f16"})
    case = CASES["matmul f16"]
    kernel, runner = case.kernel, case.kernel.runner
    arguments = runner.arguments(kernel.bound(*case.arguments(64)), True)
    program = compile_stages(kernel.function, runner.signature(arguments, True), target).stages.thread
    text, _ = llvm_text(program, target)
    assert "OpTypeFloat 16" in text and "OpFConvert" in text
    assert ("RoundingModeRTE 16" in text) == (name == "spirv-vulkan")
    # What an extension adds (cl_khr_fp16), the validator's OpenCL does not know.
    validate(assemble(text), name, tmp_path, "spv1.0" if name == "spirv-opencl" else "")


@pytest.mark.parametrize("bits", [16, 32, 64])
@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -3.25, 6e-5, float("inf"), -float("inf"), float("nan")])
def test_floats(value: float, bits: int) -> None:
    raw = float_bits(float_text(value, bits), bits)
    with np.errstate(all="ignore"):
        wanted = np.array(value, f"f{bits // 8}")
    found = np.array(raw, f"u{bits // 8}").view(f"f{bits // 8}")
    assert found.tobytes() == wanted.tobytes() or (np.isnan(found) and np.isnan(wanted))


def test_numbers_of_the_tables() -> None:
    assert (OPCODES["OpFAdd"], OPCODES["OpLoopMerge"], NAMES["PhysicalStorageBuffer"]) == (129, 246, 5349)
    assert len({*OPCODES.values()}) == len(OPCODES)


@tw.gpu
def promises(x: tw.GpuBuffer[tw.f32]):  # type: ignore[no-untyped-def]
    i = tw.gpu_thread_id()
    assert x[i] > 0.0
    x[i] = 1.0


@pytest.mark.parametrize("target", ENVIRONMENTS)
def test_what_a_target_lacks_is_refused_at_its_line(target: str) -> None:
    with pytest.raises(TargetLimit, match=f"{target} cannot do assert") as caught:
        promises[1, 32].compile(np.ones(32, np.float32), target=target)
    assert caught.value.diagnostics[0].span.line


@pytest.mark.parametrize("target", ENVIRONMENTS)
def test_export(target: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["export", str(GALLERY), "--kernel", "scale", "--target", target, "--args", "m=f32[*,*] v=f32[*]", "-o", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "scale.spv").read_bytes()[:4] == b"\x03\x02\x23\x07"
    assert '"convention"' in (tmp_path / "scale.json").read_text()
