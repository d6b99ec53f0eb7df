"""A failing kernel made small: as long as it fails in the same way, parts are dropped and simplified.

In: a kernel and a question, "does this one still fail alike?". Out: the smallest found. A kernel that is not whole any more (a
name without a value) is never asked about.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from . import model
from .arithmetic import KINDS
from .model import (
    Accumulate,
    Binary,
    Expr,
    For,
    Function,
    If,
    Kernel,
    Lit,
    Load,
    Make,
    Range,
    Set,
    Shared,
    Stmt,
    Store,
    Swap,
    Var,
    While,
    Whole,
    children,
    trimmed,
    walk,
)

Question = Callable[[Kernel], bool]


def shrink(kernel: Kernel, fails: Question, seconds: float = 60.0) -> Kernel:
    """The smallest kernel that still fails, as far as time allows."""
    end = time.monotonic() + seconds
    changed = True
    while changed and time.monotonic() < end:
        changed = False
        for smaller in candidates(kernel):
            if time.monotonic() > end:
                break
            smaller = trimmed(smaller)
            if is_whole(smaller) and weight(smaller) < weight(kernel) and fails(smaller):
                kernel, changed = smaller, True
                break
    return kernel


def weight(kernel: Kernel) -> tuple[int, int, int, int]:
    nodes = sum(1 for s in kernel.body for _ in walk(s))
    plain = sum(i.layout != "contiguous" for i in kernel.inputs) + bool(kernel.out) + sum(i.style != "small" for i in kernel.inputs)
    used = dtypes_of(kernel)
    odd = len(used) + sum(len(PLAINER.get(dtype, ())) for dtype in used)
    return nodes + len(kernel.results), plain, odd, sum(e for _, e in kernel.dims) + kernel.block + kernel.grid


# -- smaller kernels -------------------------------------------------------------------------------------------------


def candidates(kernel: Kernel) -> Iterator[Kernel]:
    """Kernels a little simpler, the largest steps first."""
    for body in shorter(kernel.body):
        yield with_body(kernel, body)
    for at in range(len(kernel.results)):
        if len(kernel.results) > 1:
            yield replace(kernel, results=kernel.results[:at] + kernel.results[at + 1 :])
    for body in simpler_body(kernel.body):
        yield with_body(kernel, body)
    if kernel.out:
        yield replace(kernel, out="")
    if kernel.given:
        yield replace(kernel, given=())
    for at, given in enumerate(kernel.inputs):
        for plain in (replace(given, layout="contiguous"), replace(given, style="small")):
            if plain != given:
                yield replace(kernel, inputs=(*kernel.inputs[:at], plain, *kernel.inputs[at + 1 :]))
    for at, (dim, extent) in enumerate(kernel.dims):
        for less in (1, 2, 3, extent // 2, extent - 1):
            if 0 < less < extent:
                yield replace(kernel, dims=(*kernel.dims[:at], (dim, less), *kernel.dims[at + 1 :]))
    if kernel.explicit and kernel.grid > 1:
        yield replace(kernel, grid=1)
    used = dtypes_of(kernel)
    for dtype in sorted(used):
        for plainer in PLAINER.get(dtype, ()):
            yield with_dtype(kernel, dtype, plainer)


# -- dtypes ----------------------------------------------------------------------------------------------------------

PLAINER = {
    "f8e4m3": ("f32", "f16"), "f8e5m2": ("f32", "f16"), "bf16": ("f32", "f16"), "f16": ("f32",), "f64": ("f32",),
    "u8": ("u32",), "u16": ("u32",), "i8": ("i32",), "i16": ("i32",),
}  # fmt: skip
"""What a dtype may become everywhere in a kernel. Indices are i64, which stays; so does what decides the sign."""


def dtypes_of(kernel: Kernel) -> set[str]:
    nodes = [*kernel.inputs, *kernel.numbers, *(n for s in kernel.body for n in walk(s))]
    return {value for node in nodes for name in ("dtype", "at") if isinstance(value := getattr(node, name, None), str)}


def with_dtype(node: Any, before: str, after: str) -> Any:
    """The same with one dtype in place of another."""
    if isinstance(node, tuple):
        return tuple(with_dtype(n, before, after) for n in node)
    if not is_dataclass(node) or isinstance(node, type | model.Size):
        return node
    changes = {}
    for each in fields(node):
        value = getattr(node, each.name)
        new = after if each.name in ("dtype", "at") and value == before else with_dtype(value, before, after)
        if new is not value:
            changes[each.name] = new
    return replace(node, **changes) if changes else node


def well_typed(kernel: Kernel) -> bool:
    """Whether what the language computes in f64, quotients and functions of integers, still is f64."""
    for stmt in kernel.body:
        for node in walk(stmt):
            sources = (node.left, node.right) if isinstance(node, Binary) and node.op == "/" else (node.value,) if isinstance(node, Function) else ()
            if sources and node.dtype != "f64" and all(KINDS[source.dtype].kind != "f" for source in sources):
                return False
    return True


def with_body(kernel: Kernel, body: tuple[Stmt, ...]) -> Kernel:
    kept = {s.name for s in body if isinstance(s, Make | Set | Whole)}
    return replace(kernel, body=body, results=tuple(r for r in kernel.results if r in kept))


def shorter(body: tuple[Stmt, ...]) -> Iterator[tuple[Stmt, ...]]:
    """Without one statement, or with the inside of one in its place."""
    for at, stmt in enumerate(body):
        before, after = body[:at], body[at + 1 :]
        yield before + after
        if isinstance(stmt, If):
            yield before + stmt.then + after
            yield before + stmt.other + after
            if stmt.other:
                yield (*before, replace(stmt, other=()), *after)
        for name in ("body", "then", "other"):
            inner = getattr(stmt, name, None)
            if isinstance(inner, tuple) and inner:
                for less in shorter(inner):
                    if less or name == "other":
                        yield (*before, replace(stmt, **{name: less}), *after)  # type: ignore[type-var]


def simpler_body(body: tuple[Stmt, ...]) -> Iterator[tuple[Stmt, ...]]:
    for at, stmt in enumerate(body):
        for simple in simpler(stmt):
            yield (*body[:at], simple, *body[at + 1 :])


def simpler(node: Any) -> Iterator[Any]:
    """The node with one expression inside it replaced by a part of it or by a literal."""
    if isinstance(node, Expr):
        for child in children(node):
            if isinstance(child, Expr) and child.dtype == node.dtype and not isinstance(node, Load):
                yield child
    if isinstance(node, Range):
        for plain in (replace(node, step=1), replace(node, start=Lit("i64", 0))):
            if plain != node:
                yield plain
    for each in fields(node):
        if each.name in ("indices",) and isinstance(node, Store):
            continue
        value = getattr(node, each.name)
        if isinstance(value, tuple) and value and is_dataclass(value[0]) and not isinstance(value[0], model.Size):
            for at, item in enumerate(value):
                for simple in simpler(item):
                    yield replace(node, **{each.name: (*value[:at], simple, *value[at + 1 :])})
        elif is_dataclass(value) and not isinstance(value, model.Size | type):
            if isinstance(value, Expr) and not isinstance(value, Lit | Var) and each.name in ("value", "cond") and isinstance(node, Stmt | model.Cast):
                yield replace(node, **{each.name: plain_literal(value.dtype)})
            for simple in simpler(value):
                yield replace(node, **{each.name: simple})


def plain_literal(dtype: str) -> Expr:
    """A value of that type without anything in it."""
    value: int | float = 1.0 if KINDS[dtype].kind == "f" else True if dtype == "bool" else 1
    return model.Cast(dtype, Lit(dtype if dtype != "bool" else "bool", value))


# -- what is whole ---------------------------------------------------------------------------------------------------


def is_whole(kernel: Kernel) -> bool:
    """Whether every name that is used has a value, and something is computed."""
    written = {i.name for i in kernel.inputs if i.written}
    if not (kernel.results or any(isinstance(n, Store) and n.array in written for s in kernel.body for n in walk(s))):
        return False
    summed = {n.name for s in kernel.body for n in walk(s) if isinstance(n, Accumulate)}
    if any(isinstance(n, Set) and not n.fixed and isinstance(n.value, Lit) and n.name not in summed for s in kernel.body for n in walk(s)):
        return False  # its type would be another one
    if any(isinstance(n, Accumulate) and isinstance(n.value, Lit) for s in kernel.body for n in walk(s)):
        return False  # a sum of literals alone, whose type would be another one
    if not well_typed(kernel):
        return False
    names = {i.name for i in kernel.inputs} | {n.name for n in kernel.numbers} | {"t", "i"}
    return _whole_body(kernel.body, names, set())


def _whole_body(body: tuple[Stmt, ...], names: set[str], outer: set[str]) -> bool:
    names = set(names)
    for stmt in body:
        if isinstance(stmt, Make | Shared):
            names.add(stmt.name)
            continue
        if isinstance(stmt, Swap):
            if not names.issuperset(stmt.names):
                return False
            continue
        inside: set[str] = set()
        if isinstance(stmt, For):
            inside = set(stmt.names)
        elif isinstance(stmt, While):
            inside = {stmt.counter}
        elif isinstance(stmt, Whole):
            inside = set(stmt.names)
        known = names | inside
        if isinstance(stmt, Accumulate | Store) and (stmt.name if isinstance(stmt, Accumulate) else stmt.array) not in names:
            return False
        if isinstance(stmt, Set) and not stmt.declares and stmt.name not in names:
            return False
        for each in fields(stmt):
            value = getattr(stmt, each.name)
            if each.name in ("body", "then", "other"):
                if value and not _whole_body(value, known, names):
                    return False
                if not value and each.name != "other":
                    return False
                continue
            for item in value if isinstance(value, tuple) else (value,):
                if is_dataclass(item) and not isinstance(item, type):
                    for node in walk(item):
                        used = node.array if isinstance(node, Load) else node.name if isinstance(node, Var | model.Index) else None
                        if used is not None and used not in known:
                            return False
        if isinstance(stmt, Set | Whole):
            names.add(stmt.name)
    return True


# -- cases in files --------------------------------------------------------------------------------------------------


def to_data(node: Any) -> Any:
    if is_dataclass(node) and not isinstance(node, type):
        return {"is": type(node).__name__, **{f.name: to_data(getattr(node, f.name)) for f in fields(node) if f.name != "tags"}}
    if isinstance(node, tuple | list):
        return [to_data(n) for n in node]
    return {"float": repr(node)} if isinstance(node, float) else node


def from_data(data: Any) -> Any:
    if isinstance(data, list):
        return tuple(from_data(d) for d in data)
    if isinstance(data, dict):
        if "float" in data:
            return float(data["float"])
        kind = getattr(model, data["is"])
        names = {f.name for f in dataclasses.fields(kind)}
        return kind(**{k: from_data(v) for k, v in data.items() if k in names})
    return data


def write_case(kernel: Kernel, path: Path, devices: str, note: str) -> None:
    """A case that tests replay: the kernel as data, and its text for readers."""
    from .source import kernel_text, signature

    path.parent.mkdir(parents=True, exist_ok=True)
    case = {"what": note, "devices": devices, "arguments": signature(kernel), "text": kernel_text(kernel).splitlines(), "kernel": to_data(kernel)}
    path.write_text(json.dumps(case, indent=1) + "\n", encoding="utf-8")


def read_case(path: Path) -> tuple[Kernel, tuple[str, ...]]:
    case = json.loads(path.read_text(encoding="utf-8"))
    kernel = from_data(case["kernel"])
    assert isinstance(kernel, Kernel)
    return kernel, tuple(case["devices"].split(","))
