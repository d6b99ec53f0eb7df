"""Ops that `passes/common/outline.py` marks are functions of their own, with registers of their own.

In: the writer of a kernel's function, at an op with the mark `outlined`. Out: a call in the function, and the text of what is called. Values from outside are arguments;
addresses and sizes are made again inside. Where code inside leaves the kernel (a loop that is asked to stop), the function says so and the caller leaves, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tilewright.base.errors import CompilerBug
from tilewright.codegen.llvm.emitter import Dialect, FunctionWriter, llvm_type
from tilewright.ir.nodes import Kernel, Op, Value
from tilewright.ir.types import Tensor

_NAME = re.compile(r"%([\w.]+)")
_DEFINED = re.compile(r"  %([\w.]+) = ")
_LABEL = re.compile(r"([\w.]+):$")


class OutliningWriter(FunctionWriter):
    """Writes the body of a kernel's function, and the functions that parts of it become."""

    def __init__(self, kernel: Kernel, dialect: Dialect, entry: str, local: Mapping[Value, str]) -> None:
        super().__init__(kernel, dialect, share=True)
        self.entry = entry
        self.local = local
        """Where local arrays lie: known once sizes are."""
        self.arguments = "noalias " if kernel.attrs.get("noalias", True) else ""
        self.outlined: list[tuple[str, list[str], str]] = []
        """The functions: parameters, lines, and what they return."""

    def op(self, op: Op) -> Sequence[str]:
        return super().op(op) if "outlined" not in op.attrs else self._call(op)

    def functions(self, attributes: str) -> list[str]:
        """Their text."""
        return [
            "\n".join([f"define internal {kind} @{self.entry}.outlined{number}({params}) noinline {attributes} {{", "entry:", *lines, "}", ""])
            for number, (params, lines, kind) in enumerate(self.outlined)
        ]

    def _call(self, op: Op) -> list[str]:
        before, label = self.lines, self.label
        shared, anchors = self.shared, self.anchors
        self.lines, self.label, self.shared, self.anchors = [], "entry", {}, {}
        super().op(op)
        lines = self.lines
        self.lines, self.label, self.shared, self.anchors = before, label, shared, anchors

        labels = {"entry", *(match.group(1) for line in lines if (match := _LABEL.match(line)))}
        defined = {match.group(1) for line in lines if (match := _DEFINED.match(line))}
        used = dict.fromkeys(name for line in lines for name in _NAME.findall(line))
        leaves = "out" in used
        given = [name for name in used if name not in defined and name not in labels and name != "out"]
        types = self._types()
        if missing := [name for name in given if name not in types]:
            raise CompilerBug.at("TW040", f"{self.entry}: nobody knows what %{missing[0]} is in code that becomes a function", op.span)
        kind = "i1" if leaves else "void"
        lines += ["  ret i1 false", "out:", "  ret i1 true"] if leaves else ["  ret void"]
        params = ", ".join(f"{types[name]} {self.arguments if self._is_array(name) else ''}%{name}" for name in given)
        call = f"call {kind} @{self.entry}.outlined{len(self.outlined)}({', '.join(f'{types[name]} %{name}' for name in given)})"
        self.outlined.append((params, lines, kind))
        self.current = op
        if not leaves:
            self.line(call)
            return []
        following = self.new_label("on")
        self.line(f"br i1 {self.let(call)}, label %out, label %{following}")
        self.open_label(following)
        return []

    def _types(self) -> dict[str, str]:
        """The type of each name that code inside may need of what is outside."""
        found = {"block": "i64", "report": "ptr"}
        for value, name in self.names.items():
            found[name[1:]] = "ptr" if isinstance(value.type, Tensor) else llvm_type(value.type)
        found |= {name[1:]: "i64" for name in (*self.sizes.values(), *self.size_names.values())}
        return found | {name[1:]: "ptr" for name in self.local.values()}

    def _is_array(self, name: str) -> bool:
        return any(self.names.get(param) == f"%{name}" and isinstance(param.type, Tensor) for param in self.kernel.params)
