"""Compiled kernels on CPUs other than this one: exported objects, linked with a small program in C, under an emulator of the CPU.

In: kernels, and for each the arguments of several calls. Out: what each call returns. One process runs all of them. Arrays lie between pages that cannot be
touched: those of every second call end where one begins, those of the others begin where one ends. Every second call runs its blocks one by one from the last
to the first. Results are filled with a pattern beforehand.
"""

from __future__ import annotations

import ast
import platform
import re
import shutil
import struct
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import tilewright as tw

_COMPILER = "aarch64-linux-gnu-gcc"
_EMULATORS = ("qemu-aarch64-static", "qemu-aarch64")
_CPUS = {"aarch64-sve256": "max,sve256=on", "aarch64-sve512": "max,sve512=on,sve-default-vector-length=64", "aarch64-neon": "neoverse-n1", "aarch64-scalar": "cortex-a53"}

_HEAD = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>

enum { PAGE = 65536 };
static FILE *in, *out;

static int64_t whole(void) { int64_t n; if (fread(&n, 8, 1, in) != 1) exit(90); return n; }
static double number(void) { double n; if (fread(&n, 8, 1, in) != 1) exit(91); return n; }

typedef struct { char *data; int64_t bytes; } array;
static array room(int at_end) {
    array a = {0, whole()};
    size_t pages = (a.bytes + PAGE - 1) / PAGE * PAGE;
    char *base = mmap(0, pages + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED || (pages && mprotect(base + PAGE, pages, PROT_READ | PROT_WRITE))) exit(92);
    a.data = base + PAGE + (at_end ? pages - a.bytes : 0);
    memset(a.data, 0xA5, a.bytes);
    return a;
}
static array given(int at_end) {
    array a = room(at_end);
    if (a.bytes && fread(a.data, a.bytes, 1, in) != 1) exit(93);
    return a;
}
static void keep(array a) { if (a.bytes && fwrite(a.data, a.bytes, 1, out) != 1) exit(94); }

static void runner(void *context, tilewright_body body, void *slots, int64_t blocks) {
    (void)context;
    while (blocks-- > 0) body(slots, blocks, blocks + 1);
}
"""

_MAIN = """
int main(int count, char **names) {{
    if (count != 3) return 95;
    {length}
    in = fopen(names[1], "rb");
    out = fopen(names[2], "wb");
    if (!in || !out) return 97;
{calls}
    return fclose(out) ? 98 : 0;
}}
"""
_LENGTH = "if ((prctl(PR_SVE_GET_VL) & 0xffff) != {}) return 96;"


def emulator_lacks() -> str:
    """Why code for aarch64 cannot be run here; empty where it can."""
    if not any(map(shutil.which, _EMULATORS)):
        return "qemu-aarch64 is not installed (apt install qemu-user-static)"
    if not shutil.which(_COMPILER):
        return f"{_COMPILER} is not installed (apt install gcc-aarch64-linux-gnu libc6-dev-arm64-cross)"
    return ""


def native_lacks() -> str:
    """Why exported code for x86-64 cannot be linked and run here."""
    if platform.machine() not in ("x86_64", "AMD64") or platform.system() != "Linux":
        return "the code is for Linux on x86-64"
    return "" if shutil.which("cc") else "there is no C compiler"


@dataclass(frozen=True)
class Calls:
    """A kernel and calls of it: arguments, and arrays of the shapes and types of the results."""

    kernel: tw.Kernel
    arguments: Sequence[Sequence[object]]
    results: Sequence[Sequence[np.ndarray]]


@dataclass(frozen=True)
class _Param:
    """A parameter of the C function."""

    name: str
    c_type: str
    is_array: bool
    is_constant: bool


def run(kernels: Mapping[str, Calls], target: str, folder: Path) -> dict[str, list[list[np.ndarray]]]:
    """The results of all calls, by kernel: arrays that are written in place, then those returned."""
    blocks, data, kept = [], [], []
    for name, calls in kernels.items():
        tw.export(calls.kernel, *calls.arguments[0], target=target, folder=folder, name=name)
        params = _params((folder / f"{name}.h").read_text(), name)
        described = _description((folder / f"{name}.py").read_text())
        written: list[tuple[np.ndarray, ...]] = []
        for arguments, results in zip(calls.arguments, calls.results, strict=True):
            data.append(_packed(params, arguments, results, described))
            in_place = [np.asarray(a) for p, a in zip(params, arguments, strict=False) if p.is_array and not p.is_constant]
            written.append((*in_place, *results))
        blocks.append(_block(name, params, len(calls.arguments[0]), len(calls.arguments)))
        kept.append((name, written))
    length = {"aarch64-sve256": _LENGTH.format(32), "aarch64-sve512": _LENGTH.format(64)}.get(target, "")
    text = "".join(f'#include "{name}.h"\n' for name in kernels) + _HEAD + _MAIN.format(length=length, calls="\n".join(blocks))
    (folder / "main.c").write_text(text)
    (folder / "in").write_bytes(b"".join(data))
    _build_and_run(target, list(kernels), folder)
    return _unpacked((folder / "out").read_bytes(), kept)


def _build_and_run(target: str, names: Sequence[str], folder: Path) -> None:
    other = target.startswith("aarch64")
    compiler = [_COMPILER, "-static"] if other else ["cc"]
    command = [*compiler, "-std=gnu11", "-Wall", "-Werror", "-Wno-unused-function", "-O1", "main.c", *(f"{name}.o" for name in names), "-o", "main", "-lm"]
    built = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert built.returncode == 0, built.stderr
    emulator = next(filter(None, map(shutil.which, _EMULATORS)), "")
    prefix = [emulator, "-cpu", _CPUS[target]] if other else []
    done = subprocess.run([*prefix, "./main", "in", "out"], cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"exit status {done.returncode} (96: vectors of another length): {done.stderr}"


def _params(header: str, name: str) -> list[_Param]:
    found = re.search(rf"^int32_t {name}\((.*)\);", header, re.MULTILINE)
    assert found, header
    params = []
    for text in found[1].split(", "):
        kind, _, called = text.replace("*", "* ").rpartition(" ")
        params.append(_Param(called, kind.removeprefix("const ").rstrip("* "), "*" in kind, kind.startswith("const")))
    return params


def _description(loader: str) -> dict[str, object]:
    for node in ast.parse(loader).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "DESCRIPTION":
            described = ast.literal_eval(node.value)
            assert isinstance(described, dict)
            return described
    raise AssertionError("no DESCRIPTION")


def _packed(params: Sequence[_Param], arguments: Sequence[object], results: Sequence[np.ndarray], described: Mapping[str, object]) -> bytes:
    """What the program reads for one call."""
    values = dict(zip((p.name for p in params), arguments, strict=False))
    bindings, names = described["bindings"], described["sizes"]
    assert isinstance(bindings, tuple) and isinstance(names, tuple)
    sizes = {}
    for size, array, axis, is_stride in bindings:
        bound = np.asarray(values[array])
        sizes[size] = bound.strides[axis] // bound.itemsize if is_stride else bound.shape[axis]
    parts = []
    for position, param in enumerate(params):
        if position < len(arguments):
            value = arguments[position]
            if param.is_array:
                assert isinstance(value, np.ndarray) and value.flags.c_contiguous
                parts.append(struct.pack("<q", value.nbytes) + value.tobytes())
            else:
                assert isinstance(value, int | float)
                parts.append(struct.pack("<d" if param.c_type in ("float", "double") else "<q", value))
        elif param.is_array:
            parts.append(struct.pack("<q", results[position - len(arguments)].nbytes))
        else:
            parts.append(struct.pack("<q", sizes[param.name]))
    return b"".join(parts)


def _block(name: str, params: Sequence[_Param], inputs: int, calls: int) -> str:
    """The calls of one kernel in C."""
    lines, passed = [], []
    for position, param in enumerate(params):
        if param.is_array:
            lines.append(f"array p{position} = {'given' if position < inputs else 'room'}(call % 2);")
            passed.append(f"(void *)p{position}.data")
        else:
            lines.append(f"{param.c_type} p{position} = ({param.c_type}){'number' if param.c_type in ('float', 'double') else 'whole'}();")
            passed.append(f"p{position}")
    given = ", ".join(passed)
    lines += [
        f"int32_t code = call % 2 ? {name}_with({given}, runner, 0) : {name}({given});",
        f'if (code) {{ fprintf(stderr, "{name}: %s\\n", {name}_error(code)); return 99; }}',
        *(f"keep(p{position});" for position, param in enumerate(params) if param.is_array and not param.is_constant),
    ]
    body = "\n".join(f"        {line}" for line in lines)
    return f"    for (int call = 0; call < {calls}; ++call) {{\n{body}\n    }}"


def _unpacked(data: bytes, kept: Sequence[tuple[str, Sequence[tuple[np.ndarray, ...]]]]) -> dict[str, list[list[np.ndarray]]]:
    found: dict[str, list[list[np.ndarray]]] = {}
    place = 0
    for name, calls in kept:
        found[name] = []
        for like in calls:
            arrays = []
            for one in like:
                arrays.append(np.frombuffer(data, one.dtype, one.size, place).reshape(one.shape))
                place += one.nbytes
            found[name].append(arrays)
    assert place == len(data)
    return found
