"""Ahead of time: a kernel as files that need nothing of Tilewright. In: a kernel, a signature, a target; out: files by name.

For a CPU: an object with a C function, the same as a shared library where the target is Linux, a C header, and a Python loader that
needs only ctypes. For NVIDIA GPUs: PTX, a cubin where `ptxas` is at hand, a header that says how to launch each kernel (as C functions
of the sizes), and a Python loader that needs only `cuda-bindings`; and where asked, the code as data of an object for a CPU (`embedded_code.py`). For WebGPU: `export_web.py`.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import os
import pprint
import sys
import tempfile
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from tilewright.base.abi import (
    GIVE,
    LAUNCH_DECLARATIONS,
    LAUNCHES_ALONE,
    LOCAL_MEMORY,
    NEVER_STOPS,
    STOP_DECLARATION,
    TAKE,
)
from tilewright.base.artifact import (
    FAILURE,
    FAILURE_FIELDS,
    ArrayParam,
    Artifact,
    CallCheck,
    IndexSite,
    Launch,
    MapParam,
    ScalarParam,
)
from tilewright.base.dtypes import i64
from tilewright.base.errors import TargetLimit, UserError
from tilewright.base.sizes import Size, SizeCall, number_name, product
from tilewright.base.target import Target, parse_target
from tilewright.codegen.host.c_entry import (
    MISALIGNED,
    NEGATIVE,
    NO_MEMORY,
    NOTHING_FIXED,
    NULL,
    OUTSIDE,
    SCRATCH,
    TOO_LARGE,
    Fixed,
    call_checks,
    entry_text,
    exported_names,
    identifier,
    size_names,
    whole_numbers,
)
from tilewright.codegen.host.embedded_code import C_TYPES, embedded_text, given_sizes
from tilewright.codegen.host.shared_library import shared_library
from tilewright.codegen.llvm import native
from tilewright.codegen.nvptx.ptxas import cubin
from tilewright.compile.build import describe_program, llvm_text
from tilewright.compile.driver import Signature, at_level, compile_kernel, compile_stages
from tilewright.compile.export_web import describe as web_description
from tilewright.compile.export_web import web_files
from tilewright.frontend.simt.build import GRID
from tilewright.ir.program import Program
from tilewright.runtime.loaders import DRIVER_API, common, cpu, ptx
from tilewright.tree.syntax import Function

_C_TYPES = {
    "bool": "uint8_t", "i8": "int8_t", "i16": "int16_t", "i32": "int32_t", "i64": "int64_t", "u8": "uint8_t", "u16": "uint16_t",
    "u32": "uint32_t", "u64": "uint64_t", "f32": "float", "f64": "double", "f16": "uint16_t", "bf16": "uint16_t", "f8e4m3": "uint8_t",
    "f8e5m2": "uint8_t",
}  # fmt: skip


def export_target(target: Target) -> Target:
    """The target itself, but without matrix units of CPUs: a process must ask the system for them before it may use them."""
    return parse_target(target.name.removesuffix("-amx") + "-avx512") if target.name.endswith("-amx") else target


def write_files(files: dict[str, bytes], folder: str | Path) -> list[Path]:
    """Write files to a folder, each whole or not at all; their paths."""
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            handle, temporary = tempfile.mkstemp(dir=place, prefix=f".{name}.")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(data)
                os.chmod(temporary, 0o755 if name.endswith(".so") else 0o644)
                os.replace(temporary, place / name)
            except BaseException:
                os.unlink(temporary)
                raise
    except OSError as error:
        raise UserError.at("TW007", f"'{place}' cannot be written: {error.strerror or error}") from None
    return [place / name for name in files]


def export(function: Function, signature: Signature, target: Target, name: str = "", embed: Target | None = None) -> dict[str, bytes]:
    """The files, each under its name. With `embed`, a CPU, code for an NVIDIA GPU is also data of an object for that CPU."""
    name = identifier(name or function.name)
    check_embed(target, embed)
    if target.kind == "wgsl":
        return web_files(compile_kernel(function, signature, target), name)
    if target.kind == "msl":
        return _metal_files(compile_kernel(function, signature, target), name)
    if target.kind.startswith("spirv-"):
        return _spirv_files(compile_kernel(function, signature, target), name)
    if target.kind not in ("cpu", "nvptx", "amdgpu"):
        raise TargetLimit.at("TW020", f"{target.name} is a target from outside: there are no files to export for it")
    if not target.is_host:
        artifact = compile_kernel(function, signature, target)
        return _amd_files(artifact, name) if target.kind == "amdgpu" else _gpu_files(artifact, name, target, embed)
    done = compile_stages(function, signature, target)
    target = at_level(function, target)
    return cpu_export(done.stages.thread, describe_program(done.stages.thread, target), target, name)


def export_pipeline(
    function: Function, signature: Signature, target: Target, name: str, fixed: Fixed, checks: Callable[[Artifact], tuple[CallCheck, ...]]
) -> tuple[dict[str, bytes], int]:  # fmt: skip
    """The files of a whole pipeline for a CPU, and how many kernels it is. `fixed` are numbers that are part of the code, `checks` what calls check besides what its blocks need."""
    if not target.is_host:
        raise TargetLimit.at(
            "TW020",
            f"whole pipelines are exported for CPUs, not for {target.name}",
            help="export its kernels: leave out --pipeline",
        )
    done = compile_stages(function, signature, target)
    target = at_level(function, target)
    artifact = describe_program(done.stages.thread, target)
    artifact = replace(artifact, checks=(*artifact.checks, *checks(artifact)))
    return cpu_export(done.stages.thread, artifact, target, identifier(name), fixed), len(artifact.launches)


def check_embed(target: Target, embed: Target | None) -> None:
    """Refuse to embed what is no code for NVIDIA's GPUs, and where it would not be an object of a CPU."""
    if embed is not None and target.kind != "nvptx":
        raise TargetLimit.at("TW020", f"code is embedded for NVIDIA's GPUs, not for {target.name}", help="choose a target such as sm_90a, or leave out embed")
    if embed is not None and not embed.is_host:
        raise TargetLimit.at("TW020", f"code is embedded in an object for a CPU, and {embed.name} is none", help="cpu is this machine; others are x86-64-avx2, aarch64-neon…")


def export_explicit(
    program: Program, artifact: Artifact | None, written: Collection[str], target: Target, name: str, embed: Target | None = None
) -> dict[str, bytes]:  # fmt: skip
    """The files of an explicit kernel: of its artifact for a GPU, of its program at the thread stage for a CPU. The grid's extents are arguments."""
    name = identifier(name)
    check_embed(target, embed)
    if target.is_host:
        artifact = describe_program(program, target)
    elif artifact is None or target.kind != "nvptx":
        raise TargetLimit.at("TW020", f"explicit kernels are exported for CPUs and NVIDIA's GPUs, not for {target.name}")
    grids = dict.fromkeys(size for launch in artifact.launches for size in launch.sizes if size in GRID)
    known = (replace(p, role="inout") if isinstance(p, ArrayParam) and p.name in written else p for p in artifact.inputs)
    artifact = replace(artifact, inputs=(*known, *(ScalarParam(size, i64) for size in grids)))
    return cpu_export(program, artifact, target, name) if target.is_host else _gpu_files(artifact, name, target, embed)


def cpu_export(
    program: Program, artifact: Artifact, target: Target, name: str, fixed: Fixed = NOTHING_FIXED
) -> dict[str, bytes]:
    """The files of a program at the thread stage for a CPU. Numbers that are `fixed` are part of the code."""
    _require_plain(artifact)
    text, _ = llvm_text(program, target)
    for inside, outside in ((TAKE, "malloc"), (GIVE, "free")):
        text = text.replace(f"@{inside}(", f"@{outside}(")
    # Only the C functions are seen from outside: several exports can be linked together. Kernels' functions, and the parts that others run, are all void.
    text = text.replace("define void @", "define internal void @")
    needed = [
        f"declare {line}"
        for line in ("ptr @malloc(i64)", "void @free(ptr)")
        if f"declare {line}" not in text and artifact.scratch
    ]
    text = "\n".join((*needed, _without_repeats(text, entry_text(artifact, name, fixed))))
    for inside, outside in zip((STOP_DECLARATION, *LAUNCH_DECLARATIONS), (NEVER_STOPS, *LAUNCHES_ALONE), strict=True):
        text = text.replace(inside, outside)
    return _cpu_files(_without_fixed(artifact, fixed), name, native.compile_object(text, target), target)


def _without_fixed(artifact: Artifact, fixed: Fixed) -> Artifact:
    """The artifact as its callers see it: numbers that are part of the code are none of their arguments."""
    if not fixed:
        return artifact
    known = {
        form: Size.of(int(value))
        for name, value in fixed.items()
        if not isinstance(value, float)
        for form in (name, number_name(name))
    }

    def put(sizes: tuple[Size, ...]) -> tuple[Size, ...]:
        return tuple(size.substitute(known) for size in sizes)

    def array(param: ArrayParam) -> ArrayParam:
        return replace(param, shape=put(param.shape), strides=put(param.strides))

    return replace(
        artifact, inputs=tuple(array(p) if isinstance(p, ArrayParam) else p for p in artifact.inputs if p.name not in fixed),
        outputs=tuple(map(array, artifact.outputs)), scratch=tuple(map(array, artifact.scratch)),
        checks=tuple(replace(c, left=c.left.substitute(known), right=c.right.substitute(known)) for c in artifact.checks),
        computed=tuple((name, size.substitute(known)) for name, size in artifact.computed),
    )  # fmt: skip


def _without_repeats(text: str, entry: str) -> str:
    """Both texts with each declaration once."""
    known = {line for line in text.splitlines() if line.startswith("declare ")}
    return text + "\n" + "\n".join(line for line in entry.splitlines() if line not in known) + "\n"


def _require_plain(artifact: Artifact) -> None:
    said = [(place, text) for launch in artifact.launches for place, text in launch.asserts if not text.startswith(LOCAL_MEMORY)]
    if said and artifact.kind == "object":
        raise UserError.at("TW020", f"the assertion '{said[0][1]}' (at {said[0][0]}) cannot be exported: a C function has no error for it", help="check the values before the call")
    for param in (*artifact.inputs, *artifact.outputs):
        if param.dtype.kind == "q":
            raise UserError.at("TW020", f"'{param.name}' is of packed blocks ({param.dtype}), which an exported function cannot take yet")
        if isinstance(param, ScalarParam) and param.dtype.is_small_float:
            raise UserError.at("TW020", f"'{param.name}' is a number of {param.dtype}, which C has no type for", help="pass it as f32")


# -- description ----------------------------------------------------------------------------------------------------


class _ExportNames:
    """Size names as identifiers, each its own."""

    def __init__(self, artifact: Artifact) -> None:
        self._taken: dict[str, str] = {}
        reserved = {identifier(p.name) for p in (*artifact.inputs, *artifact.outputs) if isinstance(p, ArrayParam)}
        self.computed = dict(artifact.computed)
        names = [*(p.name for p in artifact.inputs if isinstance(p, ScalarParam)), *(b.name for b in artifact.bindings), *self.computed]
        for name in dict.fromkeys(names):
            made = identifier(name)
            while made in reserved:
                made += "_"
            reserved.add(made)
            self._taken[name] = made
        # In sizes, a whole number has a name of its own.
        self._taken |= {number_name(p.name): self._taken[p.name] for p in artifact.inputs if isinstance(p, ScalarParam)}

    def __getitem__(self, name: str) -> str:
        return self._taken[name]

    def text(self, size: Size) -> str:
        """A size as an expression of Python."""
        return str(size.substitute({name: Size.of(self._taken[name]) for name in size.names}))


def _describe(artifact: Artifact, names: _ExportNames) -> dict[str, object]:
    def param(p: ArrayParam | ScalarParam) -> tuple[object, ...]:
        if isinstance(p, ScalarParam):
            return (p.name, p.dtype.name)
        return (p.name, p.dtype.name, tuple(map(names.text, p.shape)), tuple(map(names.text, p.strides)), p.align)

    return {
        "name": artifact.name,
        "target": artifact.target,
        "inputs": tuple(map(param, artifact.inputs)),
        "outputs": tuple(map(param, artifact.outputs)),
        "in_place": tuple(p.name for p in artifact.in_place),
        "scratch": tuple(map(param, artifact.scratch)),
        "alias_safe": artifact.alias_safe,
        "bindings": tuple((names[b.name], b.array, b.axis, b.stride) for b in artifact.bindings),
        "computed": tuple((names[name], names.text(size)) for name, size in artifact.computed),
        "checks": tuple(
            (names.text(c.left), c.relation, names.text(c.right), _message(c, names)) for c in call_checks(artifact)
        ),
        "sites": tuple(map(_outside, artifact.sites)),
    }


def _describe_launch(launch: Launch, names: _ExportNames) -> dict[str, object]:
    return {
        "entry": launch.entry, "args": launch.args, "sizes": tuple(names[name] for name in launch.sizes),
        "grid": tuple(map(names.text, launch.grid)), "threads": launch.threads, "shared": launch.shared_bytes,
        "cluster": launch.cluster, "cooperative": launch.cooperative, "persistent": launch.persistent,
        "maps": tuple(_describe_map(m, names) for m in launch.maps),
    }  # fmt: skip


def _describe_map(m: MapParam, names: _ExportNames) -> dict[str, object]:
    sizes = {key: tuple(map(names.text, getattr(m, key))) for key in ("shape", "strides", "lower", "upper")}
    plain = {key: getattr(m, key) for key in ("array", "box", "swizzle", "pixels", "steps", "rounds")}
    return {**plain, **sizes, "dtype": m.dtype.name}


def _loader(program: type, description: dict[str, object], name: str) -> bytes:
    """One Python file: what is described, and the source of the loader's class."""
    head = f'"""{name}, compiled ahead of time for {description["target"]}. Written by `tilewright export`; needs nothing of Tilewright."""'
    future = "from __future__ import annotations"
    imports: set[str] = set()
    bodies: list[str] = []
    for part in (common, sys.modules[program.__module__]):
        source = inspect.getsource(part)
        nodes = [node for node in ast.parse(source).body if isinstance(node, ast.Import | ast.ImportFrom)]
        imports |= {text for text in map(ast.unparse, nodes) if "tilewright" not in text and text != future}
        bodies.append("\n".join(source.splitlines()[nodes[-1].end_lineno or 0 :]).strip())
    described = pprint.pformat(description, width=120, sort_dicts=False)
    blocks = (head, future, "\n".join(sorted(imports)), *bodies, f"Program = {program.__name__}", f"DESCRIPTION = {described}", f"{name} = Program(DESCRIPTION)")
    return ("\n\n".join(blocks) + "\n").encode()


# -- CPU ------------------------------------------------------------------------------------------------------------


def _cpu_files(artifact: Artifact, name: str, code: bytes, target: Target) -> dict[str, bytes]:
    names = _ExportNames(artifact)
    files = {f"{name}.o": code, f"{name}.h": _cpu_header(artifact, name, names).encode()}
    if "linux" in target.triple:
        library = f"lib{name}.so"
        files[library] = shared_library(code, exported_names(name), library)
        described = _describe(artifact, names)
        described |= {"library": library, "symbol": name, "sizes": tuple(names[n] for n in size_names(artifact))}
        files[f"{name}.py"] = _loader(cpu.ExportedCpuProgram, described, name)
    return files


def _parameters(artifact: Artifact, names: _ExportNames) -> list[str]:
    """The C parameters of the function."""
    found = []
    for p in (*artifact.inputs, *artifact.outputs):
        kind = _C_TYPES[p.dtype.name]
        if isinstance(p, ScalarParam):
            found.append(f"{kind} {names[p.name]}")
        else:
            found.append(f"{'const ' if p.role == 'input' else ''}{kind} *{identifier(p.name)}")
    return found + [f"int64_t {names[name]}" for name in size_names(artifact)]


def _about(artifact: Artifact, names: _ExportNames) -> list[str]:
    """What each array is, as lines of a comment."""
    lines = []
    for p in (*artifact.inputs, *artifact.outputs):
        if isinstance(p, ArrayParam):
            shape, strides = ", ".join(map(names.text, p.shape)), ", ".join(map(names.text, p.strides))
            note = (" (as its bits)" if p.dtype.is_small_float else "") + (", written in place" if p.role == "inout" else "")
            lines.append(f"   {identifier(p.name)}: {p.dtype}[{shape}]{note}, strides in elements ({strides})")
    return lines


def _outside(site: IndexSite) -> str:
    """What an exported function says of an index that lies outside."""
    verb = "reads" if site.opcode == "load" else "writes"
    at = f" (at {site.place})" if site.place else ""
    return f"{site.kernel} {verb} '{site.array}' outside its extent on axis {site.axis}{at}; results hold part of the new values"


def _message(check: CallCheck, names: _ExportNames) -> str:
    """What is wrong, for callers that know their numbers: in place of those stand the names of the sizes."""
    text = check.message.replace(" ({values})", "")
    return text.replace("{left}", names.text(check.left)).replace("{right}", names.text(check.right))


def _cpu_header(artifact: Artifact, name: str, names: _ExportNames) -> str:
    parameters = ", ".join(_parameters(artifact, names))
    numbers = [f"{_C_TYPES[p.dtype.name]} {names[p.name]}" for p in whole_numbers(artifact)]
    asked = ", ".join((*numbers, *(f"int64_t {names[name]}" for name in size_names(artifact)))) or "void"
    guard = f"TILEWRIGHT_{name.upper()}_H"
    checks = call_checks(artifact)
    codes = [
        f'    case {number}: return "{_quoted(_message(check, names))}";' for number, check in enumerate(checks, 1)
    ]
    codes += [
        f'    case {OUTSIDE - number}: return "{_quoted(_outside(site))}";'
        for number, site in enumerate(artifact.sites, 1)
    ]
    lines = [
        f"/* {name}, compiled by Tilewright for {artifact.target}.", *_about(artifact, names),
        "   The result is 0, or a code that "
        + f"{name}_error explains; then nothing was written (for {NO_MEMORY} and codes below {OUTSIDE}, some results may be). */",
        f"#ifndef {guard}", f"#define {guard}", "#include <stdint.h>", "", "#ifdef __cplusplus", 'extern "C" {', "#endif", "",
        "#ifndef TILEWRIGHT_RUNNER", "#define TILEWRIGHT_RUNNER",
        "typedef void (*tilewright_body)(void *slots, int64_t begin, int64_t end);",
        "/* Runs body(slots, begin, end) over all of [0, blocks), in any pieces, on any threads, and returns when all are done. */",
        "typedef void (*tilewright_runner)(void *context, tilewright_body body, void *slots, int64_t blocks);", "#endif", "",
        "/* On the calling thread. */", f"int32_t {name}({parameters});",
        "/* On the threads of a runner. */",
        f"int32_t {name}_with({parameters}, tilewright_runner runner, void *context);",
        f"/* Bytes of memory for the arrays between its {len(artifact.launches)} kernel(s); or a code below 0. */",
        f"int64_t {name}_scratch_bytes({asked});",
        "/* With these bytes of your memory, at any address; a runner may be NULL. Two calls at once need memory of their own. */",
        f"int32_t {name}_using({parameters}, void *scratch, int64_t scratch_bytes, tilewright_runner runner, void *context);", "",
        f"static inline const char *{name}_error(int32_t code) {{", "    switch (code) {", '    case 0: return "";',
        f'    case {NO_MEMORY}: return "no memory for scratch arrays";', f'    case {NEGATIVE}: return "a size is negative";',
        f'    case {MISALIGNED}: return "an array is not aligned as this code needs it";', f'    case {NULL}: return "an array with elements is NULL";',
        f'    case {TOO_LARGE}: return "a number computed from the sizes is more than 64 bits hold";',
        f'    case {SCRATCH}: return "the scratch memory is NULL or too small";', *codes,
        '    default: return "unknown code";', "    }", "}", "", "#ifdef __cplusplus", "}", "#endif", "#endif", "",
    ]  # fmt: skip
    return "\n".join(lines)


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


# -- GPU ------------------------------------------------------------------------------------------------------------


def _gpu_files(artifact: Artifact, name: str, target: Target, embed: Target | None = None) -> dict[str, bytes]:
    _require_plain(artifact)
    names = _ExportNames(artifact)
    files = {f"{name}.ptx": artifact.code.rstrip(b"\0")}
    assembled = cubin(artifact.code.decode(), target.name)
    if assembled is not None:
        files[f"{name}.cubin"] = assembled
    described = _describe(artifact, names)
    described["launches"] = tuple(_describe_launch(launch, names) for launch in artifact.launches)
    # A cubin is for one architecture; the driver compiles PTX where it does not fit.
    described["code"] = tuple(file for file in (f"{name}.cubin", f"{name}.ptx") if file in files)
    files[f"{name}.h"] = _gpu_header(artifact, name, names).encode()
    files[f"{name}.py"] = _loader(ptx.ExportedGpuProgram, described, name)
    if embed is not None:
        files[f"{name}.o"] = native.compile_object(embedded_text(artifact, name, assembled, names.text), embed)
        files[f"{name}_embedded.h"] = _embedded_header(artifact, name, names, embed).encode()
    return files


def _embedded_header(artifact: Artifact, name: str, names: _ExportNames, embed: Target) -> str:
    guard = f"TILEWRIGHT_{name.upper()}_EMBEDDED_H"
    codes = [f'    case {number}: return "{_quoted(_message(check, names))}";' for number, check in enumerate(call_checks(artifact), 1)]
    sizes = [f"   {index}: {names[size]}" for index, size in enumerate((*given_sizes(artifact), *(n for n, _ in artifact.computed)))]
    sites = [f"   {number}: {_outside(site)}".replace("*/", "* /") for number, site in enumerate(artifact.sites, 1)]
    if sites:
        sites = [f"   {FAILURE} is 0 after the launches, or its first int64_t says what lay outside its array; the index and the extent follow:", *sites]
    lines = [
        f"/* {name} for {artifact.target}, as data of {name}.o for {embed.name}.", *_about(artifact, names), "   The sizes:", *sizes,
        "   Load the cubin, or the PTX where that fits no GPU of yours, with cuModuleLoadData; call check; launch all in order on one stream",
        "   with cuLaunchKernel or cuLaunchKernelEx. A grid with a 0 has nothing to launch. Numbers are passed in their own types, a bool as a byte.", *sites, "*/",
        f"#ifndef {guard}", f"#define {guard}", "#include <stdint.h>", "", "#ifdef __cplusplus", 'extern "C" {', "#endif", "", C_TYPES, "",
        f"extern const tilewright_program {name}_program;", "",
        f"static inline const char *{name}_embedded_error(int32_t code) {{", "    switch (code) {", '    case 0: return "";',
        f'    case {NEGATIVE}: return "a size is negative";', f'    case {TOO_LARGE}: return "a number computed from the sizes is more than 64 bits or a GPU\'s grid hold";', *codes,
        '    default: return "unknown code";', "    }", "}", "", "#ifdef __cplusplus", "}", "#endif", "#endif", "",
    ]  # fmt: skip
    return "\n".join(lines)


def _amd_files(artifact: Artifact, name: str) -> dict[str, bytes]:
    """A code object, and how to launch it by HIP: pointers, numbers, then sizes, each at the next place that its size divides."""
    _require_plain(artifact)
    return {f"{name}.hsaco": artifact.code, f"{name}.h": _gpu_header(artifact, name, _ExportNames(artifact), "hipModuleLaunchKernel").encode()}


_SPIRV_ARGUMENTS = {
    "spirv-opencl": "each array as its buffer and, in a number of 64 bits, where in it its first element is; each number in its own type, a bool as a byte; "
    "each size in 64 bits",
    "spirv-vulkan": "addresses of arrays, numbers in the low bytes, and sizes, 64 bits each, as push constants; where those are more than 128 bytes, the address "
    "of memory that holds them",
}


def _spirv_files(artifact: Artifact, name: str) -> dict[str, bytes]:
    """A module, and how to launch its kernels."""
    _require_plain(artifact)
    described = web_description(artifact, name)
    order: dict[str, object] = {one.entry: [*one.args, *one.sizes] for one in artifact.launches}
    whole = {
        **described, "code": f"{name}.spv", "target": artifact.target, "convention": _SPIRV_ARGUMENTS[artifact.target], "arguments": order,
    }  # fmt: skip
    return {f"{name}.spv": artifact.code, f"{name}.json": (json.dumps(whole, indent=1) + "\n").encode()}


_METAL_ARGUMENTS = (
    "each array as its buffer, at the index of its place among `arrays`, bound at the offset of its first element; then, at the next index, 64 bits each: the launch's "
    "`values`, and the numbers of `numbers` in the low bytes. A grid counts thread groups"
)


def _metal_files(artifact: Artifact, name: str) -> dict[str, bytes]:
    """A text for `newLibraryWithSource` or Apple's compiler, and how to launch its kernels."""
    _require_plain(artifact)
    described = web_description(artifact, name)
    whole = {**described, "code": f"{name}.metal", "target": artifact.target, "convention": _METAL_ARGUMENTS}
    return {f"{name}.metal": artifact.code, f"{name}.json": (json.dumps(whole, indent=1) + "\n").encode()}


_C_SIZES = (
    "/* Arithmetic on sizes. What 64 bits do not hold is TILEWRIGHT_TOO_LARGE, and so is all that is computed from it. */",
    "#define TILEWRIGHT_TOO_LARGE INT64_MIN",
    "static inline int tilewright_bad(int64_t a, int64_t b) { return a == TILEWRIGHT_TOO_LARGE || b == TILEWRIGHT_TOO_LARGE; }",
    "static inline int64_t tilewright_add(int64_t a, int64_t b) {",
    "    if (tilewright_bad(a, b) || (b > 0 ? a > INT64_MAX - b : a < -INT64_MAX - b)) return TILEWRIGHT_TOO_LARGE;",
    "    return a + b;", "}",
    "static inline int64_t tilewright_mul(int64_t a, int64_t b) {",
    "    if (tilewright_bad(a, b)) return TILEWRIGHT_TOO_LARGE;",
    "    if (a && b && (a < 0 ? -a : a) > INT64_MAX / (b < 0 ? -b : b)) return TILEWRIGHT_TOO_LARGE;",
    "    return a * b;", "}",
    "static inline int64_t tilewright_floordiv(int64_t a, int64_t b) {",
    "    if (tilewright_bad(a, b)) return TILEWRIGHT_TOO_LARGE;",
    "    return b ? a / b - (a % b != 0 && (a < 0) != (b < 0)) : 0;", "}",
    "static inline int64_t tilewright_ceildiv(int64_t a, int64_t b) {",
    "    return tilewright_bad(a, b) ? TILEWRIGHT_TOO_LARGE : -tilewright_floordiv(-a, b);", "}",
    "static inline int64_t tilewright_mod(int64_t a, int64_t b) {",
    "    if (tilewright_bad(a, b)) return TILEWRIGHT_TOO_LARGE;",
    "    return b ? a - b * tilewright_floordiv(a, b) : 0;", "}",
    "static inline int64_t tilewright_min(int64_t a, int64_t b) { return a < b ? a : b; }",
    "static inline int64_t tilewright_max(int64_t a, int64_t b) { return tilewright_bad(a, b) ? TILEWRIGHT_TOO_LARGE : a > b ? a : b; }",
    "/* A launch's grid; 0, or -4 where a GPU has no such grid. */",
    "static inline int32_t tilewright_grid(int64_t x, int64_t y, int64_t z, unsigned grid[3]) {",
    "    grid[0] = grid[1] = grid[2] = 0;",
    "    if (x < 0 || y < 0 || z < 0 || x > INT32_MAX || y > 65535 || z > 65535) return -4;",
    "    grid[0] = (unsigned)x; grid[1] = (unsigned)y; grid[2] = (unsigned)z;",
    "    return 0;", "}",
)  # fmt: skip


def _gpu_header(artifact: Artifact, name: str, names: _ExportNames, api: str = DRIVER_API) -> str:
    guard = f"TILEWRIGHT_{name.upper()}_H"
    used = [names[n] for n in dict.fromkeys((*size_names(artifact), *(p.name for p in artifact.inputs if isinstance(p, ScalarParam) and p.dtype.is_int)))]
    sizes = ", ".join(f"int64_t {n}" for n in used)
    ignored = " ".join(f"(void){n};" for n in used)
    lines = [
        f"/* {name}, compiled by Tilewright for {artifact.target}: how to launch it with {api}.", *_about(artifact, names),
        f"   Launch the kernels below in their order on one stream. {_in_python(name, artifact)} */",
        f"#ifndef {guard}", f"#define {guard}", "#include <stdint.h>", "", "#ifndef TILEWRIGHT_SIZES", "#define TILEWRIGHT_SIZES",
        *_C_SIZES, "#endif", "",
    ]  # fmt: skip
    for check in call_checks(artifact):
        relation = {"eq": "==", "le": "<=", "lt": "<"}[check.relation]
        lines.append(
            f"/* must hold: {names.text(check.left)} {relation} {names.text(check.right)}: {_message(check, names)} */".replace(
                "*/ */", "*/"
            )
        )
    lines += [f"/* {names[computed]} is {names.text(value)} */" for computed, value in artifact.computed]
    for array in artifact.scratch:
        count = _c_size(product(array.shape) * array.dtype.itemsize, names)
        lines += [f"/* bytes of the scratch array {array.name}; negative where 64 bits do not hold them */", f"static inline int64_t {name}_{identifier(array.name)}_bytes({sizes}) {{ {ignored} return {count}; }}"]
    if artifact.sites:
        lines += [
            f"/* {FAILURE} is {FAILURE_FIELDS} int64_t that must be 0 before the launch. Afterwards the first is 0, or says what lay outside its array and",
            "   was left out; the index and the extent follow.", *(f"   {number}: {_outside(site)}".replace("*/", "* /") for number, site in enumerate(artifact.sites, 1)), "*/",
        ]  # fmt: skip
    for launch in artifact.launches:
        grid = (*(_c_size(extent, names) for extent in launch.grid), "1", "1", "1")[:3]
        parameters = [*launch.args, *(f"(int64_t) {names[s]}" for s in launch.sizes), *(f"CUtensorMap of {m.array}" for m in launch.maps)]
        lines += [
            "", f"/* kernel {launch.entry}({', '.join(parameters)})", *(f"   {line}" for line in map(str, launch.maps)),
            f"   {launch.cluster} block(s) in a cluster.{_together(launch, artifact.kind)} */",
            f'#define {launch.entry.upper()} "{launch.entry}"', f"#define {launch.entry.upper()}_THREADS {launch.threads}",
            f"#define {launch.entry.upper()}_SHARED_BYTES {launch.shared_bytes}",
            f"static inline int32_t {launch.entry}_grid({sizes}{', ' if sizes else ''}unsigned grid[3]) {{",
            f"    {ignored} return tilewright_grid({', '.join(grid)}, grid);", "}",
        ]  # fmt: skip
    return "\n".join((*lines, "", "#endif", ""))


def _in_python(name: str, artifact: Artifact) -> str:
    return f"{name}.py is this in Python." if artifact.kind == "ptx" else "This code has been checked, not executed: no such device was in reach."


def _together(launch: Launch, code_kind: str = "ptx") -> str:
    """What a caller in C must know of a launch whose blocks run at once."""
    call = "hipModuleLaunchCooperativeKernel" if code_kind == "hsaco" else "cuLaunchCooperativeKernel"
    how = f" Launch it with {call}: its blocks wait for each other." if launch.cooperative else ""
    most = "cuOccupancyMaxActiveBlocksPerMultiprocessor times the multiprocessors"
    return how + (f" The grid may have fewer blocks, and must not have more than {most}." if launch.persistent else "")


def _c_size(size: Size, names: _ExportNames) -> str:
    """A size as an expression of C."""
    total = ""
    size = size.substitute(names.computed)
    for monomial, factor in size.terms:
        factors = [names[a] if isinstance(a, str) else _c_call(a, names) for a in monomial]
        if factor != 1 or not factors:
            factors.insert(0, f"INT64_C({factor})" if abs(factor) < 1 << 63 else "TILEWRIGHT_TOO_LARGE")
        term = functools.reduce(lambda a, b: f"tilewright_mul({a}, {b})", factors)
        total = f"tilewright_add({total}, {term})" if total else term
    return total or "0"


def _c_call(call: SizeCall, names: _ExportNames) -> str:
    return f"tilewright_{call.op}({_c_size(call.a, names)}, {_c_size(call.b, names)})"
