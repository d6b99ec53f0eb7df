"""Explicit kernels of a Python file: what `check` can say of them without running the file.

In: the text of a file. Out: an error (TW002) for each `tw.word` that there is not, and for each name that neither the function, nor the
file, nor Python has; and one (TW020) for each word that the target lacks: the one that was asked for, or the CPU where the kernel says that it runs there. `explicit_bodies` reads the rest of each kernel.
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Iterator

from tilewright.base.errors import Diagnostic
from tilewright.base.source import Source
from tilewright.base.target import Target, parse_target
from tilewright.cli.explicit_bodies import body_errors, values_around
from tilewright.frontend.python.expressions import SourcePlace
from tilewright.frontend.python.names import PACKAGE
from tilewright.frontend.words.rows import WORDS
from tilewright.ir.needs import FEATURES, only_gpus
from tilewright.tree.metadata import suggest
from tilewright.tree.unknown_functions import help_for

_MARKS = ("gpu", "cpu")
_CPU = parse_target("x86-64-avx2")
"""Any: what only GPUs have, no CPU has."""


def explicit_names(text: str, path: str, target: Target | None = None) -> tuple[list[str], list[Diagnostic]]:
    """The explicit kernels of a text by name, and what is wrong with them; of a target, also what it lacks."""
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return [], []  # reading the file for other kernels has said so
    place = SourcePlace(Source(path, text))
    words = dir(sys.modules[PACKAGE])
    packages = {alias.asname or alias.name for n in ast.walk(module) if isinstance(n, ast.Import) for alias in n.names if alias.name == PACKAGE}
    around = set(_bound(module)) | set(dir(builtins)) | {"__name__", "__file__", "__doc__"}
    if any(isinstance(n, ast.ImportFrom) and any(alias.name == "*" for alias in n.names) for n in ast.walk(module)):
        around |= {n.id for n in ast.walk(module) if isinstance(n, ast.Name)}  # any name may come from there
    kernels = [n for n in ast.walk(module) if isinstance(n, ast.FunctionDef) and any(_is_mark(d, packages) for d in n.decorator_list)]
    found: list[Diagnostic] = []
    known = values_around(module, place) if kernels else {}
    for kernel in kernels:
        runs_on = target or (_CPU if any(_is_for_cpu(mark) for mark in kernel.decorator_list) else None)
        if runs_on is not None:
            found += _lacking(kernel, packages, runs_on, place)
        inside = around | set(_bound(kernel))
        for part in (n for statement in kernel.body for n in ast.walk(statement)):
            if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id in packages and part.attr not in words:
                found.append(Diagnostic("TW002", f"{PACKAGE} has no '{part.attr}'", place.span(part), help_for(part.attr, sys.modules[PACKAGE].__all__, python=True)))
            elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load) and part.id not in inside:
                found.append(Diagnostic("TW002", f"unknown name '{part.id}'", place.span(part), suggest(part.id, sorted(inside - set(dir(builtins))))))
        if not any(isinstance(mark, ast.Call) and any(o.arg == "choices" for o in mark.keywords) for mark in kernel.decorator_list):
            said = {d.span.line for d in found}
            serial = any(_name(mark) == "cpu" for mark in kernel.decorator_list)
            found += [d for d in body_errors(kernel, place, known, around, serial) if d.span.line not in said]
    return [kernel.name for kernel in kernels], found


def _lacking(kernel: ast.FunctionDef, packages: set[str], target: Target, place: SourcePlace) -> Iterator[Diagnostic]:
    """Calls of words that the target lacks."""
    for node in (n for statement in kernel.body for n in ast.walk(statement)):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in {f"{package}.cluster.rank" for package in packages}:
            name, op = "cluster.rank", "cluster_rank"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name) and node.func.value.id in packages:
            name = node.func.attr
            op = WORDS[name].ops.split()[0] if name in WORDS and WORDS[name].ops else ""
        else:
            continue
        if not op:
            continue
        if target.is_gpu:
            # Which instruction a product of fragments becomes is a matter of its dtype.
            feature = "" if name.startswith("wmma_") and target.has("mma") else FEATURES.get(op, "")
            if feature and not target.has(feature):
                yield Diagnostic("TW020", f"{target.name} cannot do {name}: it has no {feature}", place.span(node), "choose a newer GPU")
        elif only_gpus(op):
            yield Diagnostic(
                "TW020", f"{name}, {only_gpus(op)}, is not available on a CPU: only GPUs have it", place.span(node), "run the kernel on a GPU or on the emulator"
            )


def _is_for_cpu(mark: ast.expr) -> bool:
    """Whether a mark says that the kernel runs on the CPU."""
    options = mark.keywords if isinstance(mark, ast.Call) else []
    return _name(mark) == "cpu" or any(o.arg == "device" and isinstance(o.value, ast.Constant) and str(o.value.value).startswith("cpu") for o in options)


def _name(mark: ast.expr) -> str:
    called = mark.func if isinstance(mark, ast.Call) else mark
    return called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""


def _is_mark(mark: ast.expr, packages: set[str]) -> bool:
    called = mark.func if isinstance(mark, ast.Call) else mark
    if isinstance(called, ast.Attribute):
        return called.attr in _MARKS and isinstance(called.value, ast.Name) and called.value.id in packages
    return isinstance(called, ast.Name) and called.id in _MARKS


def _bound(root: ast.AST) -> Iterator[str]:
    """Every name that something inside gives a meaning, in whatever block: more than Python would see, never less."""
    for node in ast.walk(root):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node.id
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).split(".")[0]
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name
