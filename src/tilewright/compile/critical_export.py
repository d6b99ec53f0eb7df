"""A critical function as files for C: an object, the same as a shared library where the target is Linux, and a header with its states as structs."""

from __future__ import annotations

from tilewright.base.errors import TargetLimit
from tilewright.base.source import Span
from tilewright.base.target import Target
from tilewright.codegen.critical.body import fault_texts
from tilewright.codegen.critical.c_function import C_TYPES, c_function_text, header_text
from tilewright.codegen.host.c_entry import identifier
from tilewright.codegen.host.shared_library import shared_library
from tilewright.codegen.llvm import native
from tilewright.compile.critical import describe_critical, lower_built
from tilewright.frontend.critical.layout import StateLayout
from tilewright.frontend.critical.reader import BuiltCritical


def export_critical(built: BuiltCritical, target: Target, name: str) -> dict[str, bytes]:
    """The files, each under its name."""
    if target.kind != "cpu":
        raise TargetLimit.at("TW020", f"critical functions are code of CPUs, and {target.name} is none", built.kernel.span)
    name = identifier(name)
    critical = describe_critical(built, lower_built(built, target))
    code = native.compile_object(c_function_text(critical, target, name), target)
    layouts: dict[str, StateLayout] = {}
    for parameter in built.signature.parameters:
        if parameter.state is not None:
            _collect(parameter.layout, layouts)
    places = [_place(op.span) for op, _ in fault_texts(critical.kernel)]
    header = header_text(critical, name, [_struct(layout) for layout in layouts.values()], places)
    files = {f"{name}.o": code, f"{name}.h": header.encode()}
    if "linux" in target.triple:
        files[f"lib{name}.so"] = shared_library(code, (name,), f"lib{name}.so")
    return files


def _collect(layout: StateLayout, found: dict[str, StateLayout]) -> None:
    """A layout after those that it is made of."""
    for field in layout.fields:
        if field.layout is not None:
            _collect(field.layout, found)
    found.setdefault(layout.name, layout)


def _struct(layout: StateLayout) -> str:
    name = identifier(layout.name)
    aligned = f"_Alignas({layout.align}) " if layout.align > max((f.layout.align if f.layout is not None else f.itemsize for f in layout.fields), default=1) else ""
    lines = []
    for number, field in enumerate(layout.fields):
        kind = C_TYPES[field.dtype.name] if field.dtype is not None else identifier(field.layout.name if field.layout is not None else "")
        lines.append(f"    {aligned if not number else ''}{kind} {identifier(field.name)}{''.join(f'[{extent}]' for extent in field.shape)};")
    guard = f"STRUCT_{name}_IS_DEFINED"  # several headers may hold it
    return f"#ifndef {guard}\n#define {guard}\ntypedef struct {name} {{\n" + "\n".join(lines) + f"\n}} {name}; /* {layout.size} bytes */\n#endif\n"


def _place(span: Span) -> str:
    return f"line {span.line}" if span.line else "-"
