"""Metal Shading Language on the host: generated text is compiled as C++ by clang against `metal_shim` and executed, one fiber for each thread of a block.

In: programs with their artifacts. Out: a library whose functions run one launch each, and the outputs of whole programs. `check_spaces` compiles the
same text as C++ for OpenCL, where address spaces are part of types.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tilewright.base.artifact import Artifact, ScalarParam
from tilewright.ir.program import Program

CLANG = shutil.which("clang++-19") or shutil.which("clang-19")
SHIM = Path(__file__).parent / "metal_shim"
_KERNEL = re.compile(r"kernel void (\w+)\((.*?)\) \{")


def compile_host(texts: Sequence[str], folder: Path) -> ctypes.CDLL:
    """One library of several modules, each in a namespace of its own; `run_K_entry` runs a launch of module K."""
    parts = ['#include <metal_stdlib>\nusing namespace metal;\n']
    for number, text in enumerate(texts):
        parts.append(f"namespace module{number} {{\n{text.replace('#include <metal_stdlib>', '')}\n}}")
        for entry, params in _KERNEL.findall(text):
            buffers = [one.split("*")[0].replace("device ", "").strip() for one in params.split(", ") if one.startswith("device ")]
            given = ", ".join(f"({kind}*)buffers[{k}]" for k, kind in enumerate(buffers))
            parts.append(
                f'extern "C" const char* run_{number}_{entry}(void** buffers, const long* p, unsigned x, unsigned y, unsigned z, int threads) {{\n'
                f"  for (unsigned c = 0; c < z; ++c) for (unsigned b = 0; b < y; ++b) for (unsigned a = 0; a < x; ++a)\n"
                f"    if (const char* problem = shim::run_block(threads, [&](int t) {{ module{number}::{entry}({given}, p, uint3{{a, b, c}}, uint3{{x, y, z}}, uint(t)); }})) return problem;\n"
                "  return nullptr;\n}"
            )
    source, library = folder / "kernels.cpp", folder / "kernels.so"
    source.write_text("\n".join(parts))
    assert CLANG is not None
    command = [CLANG, "-x", "c++", "-std=c++17", "-O0", "-fsigned-char", "-fno-fast-math", "-ffp-contract=off", "-shared", "-fPIC", "-I", str(SHIM / "host"), "-Wno-unknown-attributes",
               "-Wno-ignored-attributes", "-Werror=implicit-fallthrough", "-lstdc++", "-lm", str(source), "-o", str(library)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]
    return ctypes.CDLL(str(library))


def check_spaces(text: str, folder: Path) -> None:
    """Every pointer has the address space of what it points to."""
    source = folder / "spaces.clcpp"
    source.write_text("#include <metal_stdlib>\n" + text)
    assert CLANG is not None
    command = [CLANG, "-x", "clcpp", "-cl-std=clc++2021", "-Xclang", "-finclude-default-header", "-I", str(SHIM / "spaces"), "-fsyntax-only", "-Wno-unknown-attributes",
               "-Wno-ignored-attributes", "-target", "spir64", str(source)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]


def run(library: ctypes.CDLL, number: int, program: Program, artifact: Artifact, given: Mapping[str, object]) -> list[np.ndarray]:
    """The outputs of a program whose text is module `number`."""
    arrays = {a.name: np.ascontiguousarray(given[a.name]) for a in program.input_arrays}
    elements = {name: tuple(s // x.itemsize for s in x.strides) for name, x in arrays.items()}
    sizes = program.sizes({name: x.shape for name, x in arrays.items()}, elements)
    for array in (*program.outputs, *program.scratch):
        arrays[array.name] = np.zeros([extent.evaluate(sizes) for extent in array.type.shape], array.type.dtype.numpy)
    launch_all(library, number, artifact, arrays, given, sizes)
    return [arrays[array.name] for array in program.outputs]


def run_explicit(library: ctypes.CDLL, number: int, program: Program, artifact: Artifact, given: Sequence[np.ndarray], sizes: Mapping[str, int]) -> None:
    """Run an explicit kernel, whose arrays are changed in place."""
    launch_all(library, number, artifact, dict(zip(program.calls[0].args, given, strict=True)), {}, sizes)


def launch_all(
    library: ctypes.CDLL, number: int, artifact: Artifact, arrays: Mapping[str, np.ndarray], given: Mapping[str, object], sizes: Mapping[str, int]
) -> None:
    scalars = {p.name: p.dtype for p in artifact.inputs if isinstance(p, ScalarParam)}
    for one in artifact.launches:
        x, y, z = (*(extent.evaluate(sizes) for extent in one.grid), 1, 1, 1)[:3]
        words = [np.int64(size.evaluate(sizes)) for size in one.values]
        for name in one.args:
            if name in scalars:
                raw = np.zeros(8, np.uint8)
                octets = np.array(given[name]).astype(scalars[name].numpy).reshape(1).view(np.uint8)
                raw[: octets.size] = octets
                words.append(raw.view(np.int64)[0] if not scalars[name].is_int else np.int64(given[name]))  # type: ignore[call-overload]
        kept = [arrays[name] for name in one.args if name in arrays]
        buffers = (ctypes.c_void_p * max(1, len(kept)))(*(a.ctypes.data for a in kept))
        values = np.array(words or [0], np.int64)
        function = getattr(library, f"run_{number}_{one.entry}")
        function.restype = ctypes.c_char_p
        if min(x, y, z) > 0:
            problem = function(buffers, ctypes.c_void_p(values.ctypes.data), x, y, z, one.threads)
            assert problem is None, f"{artifact.name}: {problem.decode()}"
