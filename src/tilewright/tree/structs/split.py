"""Kernels with structs as kernels of their fields.

In: a function and what its parameters that are structs are made of. Out: the function without them, and which results are structs:

    def move(p, dt):                            def move(p_x, p_v, dt):
        out = empty(n, p.dtype)                     out_x = empty(n, f32); out_v = empty(n, f32)
        out[i] = p[i]                    ->         out_x[i] = p_x[i]; out_v[i] = p_v[i]
        out[i].x += p[i].v * dt                     out_x[i] += p_v[i] * dt
        return out                                  return out_x, out_v

A struct is a value: `v = p[i]` copies it. `p["x"]`, `p.x`, `p[i].x` and `p[i]["x"]` name a field; so do they for structs inside structs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

from tilewright.base.dtypes import DType
from tilewright.base.errors import Diagnostics, close_matches
from tilewright.base.record import record
from tilewright.base.source import Span
from tilewright.tree import syntax
from tilewright.tree.inline import declared, nodes
from tilewright.tree.structs.layout import Path, StructLayout
from tilewright.tree.syntax import Expr, Function, Node, Stmt

_MAKERS = ("empty", "zeros", "empty_like", "zeros_like")
_ABOUT_ARRAYS = ("shape", "ndim", "size", "strides")
"""What an array has beside its fields, the same for each of them."""


@record
class SplitFunction:
    """A function without structs."""

    function: Function
    params: tuple[tuple[str, tuple[tuple[Path, str], ...]], ...]
    """The parameters that were structs, each with the parameters for those of its fields that are used."""
    results: tuple[StructLayout | None, ...]
    """What each result is; None for one that is no struct. Those are one result for each field now."""


@dataclasses.dataclass(frozen=True)
class StructParts:
    """An expression whose value is a struct, or an array of them: one for each number inside."""

    layout: StructLayout
    leaves: Mapping[Path, Expr]
    element: bool
    """It is known to be an element of an array, or made in the kernel: no array."""

    def first(self) -> Expr:
        return next(iter(self.leaves.values()))

    def mapped(self, change: Callable[[Expr], Expr], element: bool = False) -> StructParts:
        return StructParts(self.layout, {path: change(leaf) for path, leaf in self.leaves.items()}, element)

    def at(self, name: str) -> Expr | StructParts | None:
        """A field; None where there is none of that name."""
        field = self.layout.field(name)
        if field is None:
            return None
        if not isinstance(field.type, StructLayout):
            return self.leaves[name,]
        return StructParts(
            field.type, {path[1:]: leaf for path, leaf in self.leaves.items() if path[0] == name}, self.element
        )


def has_structs(function: Function) -> bool:
    """Whether a kernel names structs itself, whatever it is called with."""
    return any(isinstance(node, syntax.StructType) for node in nodes((function.params, function.body)))


def annotated_layout(type_: Expr | None) -> tuple[StructLayout, tuple[Expr, ...] | None] | None:
    """What an annotation says of structs, and their extents: `Particle`, `tw.Array[Particle]` (None: any), `"Particle[n]"`. None where it names none."""
    if isinstance(type_, syntax.StructType):
        return type_.layout, ()
    if isinstance(type_, syntax.Index):
        if isinstance(type_.value, syntax.StructType):
            return type_.value.layout, type_.indices
        if len(type_.indices) == 1 and isinstance(type_.indices[0], syntax.StructType):
            return type_.indices[0].layout, None
    return None


def split_structs(
    function: Function, layouts: Mapping[str, StructLayout], sink: Diagnostics, singles: Container[str] = ()
) -> SplitFunction:
    """The function with a name for every field of a struct. What structs cannot do is reported at its place. `singles`: parameters that are one struct each."""
    splitter = _Splitter(function, layouts, sink, singles)
    body = splitter.block(function.body)
    used = {n.id for n in nodes(body) if isinstance(n, syntax.Name)}
    written = _written(body)
    params: list[syntax.Param] = []
    split: list[tuple[str, tuple[tuple[Path, str], ...]]] = []
    for param in function.params:
        layout = layouts.get(param.name)
        if layout is None:
            params.append(param)
            continue
        said = annotated_layout(param.type)
        extents = said[1] if said is not None else None
        names = {
            path: name
            for path, name in splitter.names[param.name].items()
            if name in used or (extents and name == next(iter(splitter.names[param.name].values())))
        }
        split.append((param.name, tuple(names.items())))
        if param.in_place and not written & set(names.values()) and not sink.errors:
            sink.error(
                "TW017",
                f"'{param.name}' is to be written in place, and nothing is written to it",
                param.span,
                "write to it, or declare it as tw.Array",
            )
        for path, dtype in layout.leaves():
            if path not in names:
                continue
            type_ = (
                syntax.Index(syntax.Name(dtype.name, span=param.span), extents, span=param.span) if extents else None
            )
            params.append(
                replace(
                    param,
                    name=names[path],
                    type=type_,
                    default=None,
                    in_place=param.in_place and names[path] in written,
                )
            )
    results = splitter.results or ()
    new = replace(
        function,
        params=tuple(params),
        body=body,
        result=None if any(r is not None for r in results) else function.result,
    )
    return SplitFunction(new, tuple(split), results)


class _Splitter:
    def __init__(
        self, function: Function, layouts: Mapping[str, StructLayout], sink: Diagnostics, singles: Container[str]
    ) -> None:
        self._sink = sink
        self._taken = (
            {p.name for p in function.params}
            | set(declared(function.body))
            | {n.id for n in nodes(function.body) if isinstance(n, syntax.Name)}
        )
        self.structs: dict[str, tuple[StructLayout, bool]] = {}
        """Variables that are structs, and whether each is one struct, no array."""
        self.names: dict[str, dict[Path, str]] = {}
        """The variables for their fields."""
        self.results: tuple[StructLayout | None, ...] | None = None
        for name, layout in layouts.items():
            self._declare(name, layout, name in singles)
        self._find(function.body)

    def _declare(self, name: str, layout: StructLayout, element: bool) -> None:
        self.structs[name] = layout, element
        names: dict[Path, str] = {}
        for path, _ in layout.leaves():
            base = "_".join((name, *path))
            names[path] = next(
                n for n in (base, *(f"{base}_{k}" for k in range(2, len(self._taken) + 3))) if n not in self._taken
            )
            self._taken.add(names[path])
        self.names[name] = names

    # -- which variables are structs ----------------------------------------------------------------------------------

    def _find(self, body: tuple[Stmt, ...]) -> None:
        """Assignments make variables structs, until no more are found."""
        pairs = [pair for node in nodes(body) for pair in _assigned(node)]
        found = -1
        while found != len(self.structs):
            found = len(self.structs)
            for name, value in pairs:
                layout = None if name in self.structs else self._layout(value)
                if isinstance(layout, StructLayout):
                    self._declare(name, layout, self._is_single(value))

    def _is_single(self, node: Expr) -> bool:
        """Whether an expression is one struct, no array of them, as far as it shows."""
        if isinstance(node, syntax.Name):
            return node.id in self.structs and self.structs[node.id][1]
        if isinstance(node, syntax.IfExpr):
            return self._is_single(node.then)
        if isinstance(node, syntax.Attribute) or (isinstance(node, syntax.Index) and _field_name(node) is not None):
            return self._is_single(node.value)
        return _is_element(node)

    def _layout(self, node: Expr) -> StructLayout | DType | None:
        """What an expression is, where structs lead to it; None where they do not."""
        if isinstance(node, syntax.Name):
            return self.structs[node.id][0] if node.id in self.structs else None
        if isinstance(node, syntax.Attribute | syntax.Index):
            around = self._layout(node.value)
            if not isinstance(around, StructLayout):
                return None
            name = node.name if isinstance(node, syntax.Attribute) else _field_name(node)
            if name is None:
                return around
            field = around.field(name)
            return None if field is None else field.type
        if isinstance(node, syntax.IfExpr):
            return self._layout(node.then) or self._layout(node.otherwise)
        if isinstance(node, syntax.Call):
            if isinstance(node.function, syntax.StructType):
                return node.function.layout
            return self._made(node)
        return None

    def _dtype(self, node: Expr | None) -> StructLayout | None:
        """The struct that a dtype names: `Particle`, `p.dtype`."""
        if isinstance(node, syntax.StructType):
            return node.layout
        if isinstance(node, syntax.Attribute) and node.name == "dtype":
            found = self._layout(node.value)
            return found if isinstance(found, StructLayout) else None
        return None

    def _made(self, call: syntax.Call) -> StructLayout | None:
        """What `empty`, `zeros` and their like make."""
        if not isinstance(call.function, syntax.Name) or call.function.id not in _MAKERS or not call.args:
            return None
        dtype = _dtype_argument(call)
        if dtype is not None:
            return self._dtype(dtype.value)
        found = self._layout(call.args[0].value) if call.function.id.endswith("_like") else None
        return found if isinstance(found, StructLayout) else None

    # -- statements -------------------------------------------------------------------------------------------------

    def block(self, body: Iterable[Stmt]) -> tuple[Stmt, ...]:
        return tuple(new for stmt in body for new in self._statement(stmt))

    def _statement(self, stmt: Stmt) -> tuple[Stmt, ...]:
        if isinstance(stmt, syntax.Let):
            return self._let(stmt)
        if isinstance(stmt, syntax.Assign):
            return self._assign(stmt)
        if isinstance(stmt, syntax.For):
            return (
                replace(
                    stmt,
                    ranges=self._inside(stmt.ranges),
                    over=None if stmt.over is None else self.plain(stmt.over),
                    body=self.block(stmt.body),
                ),
            )
        if isinstance(stmt, syntax.While):
            return (replace(stmt, cond=self.plain(stmt.cond), body=self.block(stmt.body)),)
        if isinstance(stmt, syntax.If):
            return (
                replace(
                    stmt, cond=self.plain(stmt.cond), then=self.block(stmt.then), otherwise=self.block(stmt.otherwise)
                ),
            )
        if isinstance(stmt, syntax.ReduceNest):
            return tuple(
                replace(stmt, loop=loop) for loop in self._statement(stmt.loop) if isinstance(loop, syntax.For)
            )
        if isinstance(stmt, syntax.Return) and stmt.value is not None:
            return (self._return(stmt, stmt.value),)
        if isinstance(stmt, syntax.Expect):
            return self._expect(stmt)
        return (self._inside(stmt),)

    def _let(self, stmt: syntax.Let) -> tuple[Stmt, ...]:
        if stmt.shared:
            layout = self._dtype(stmt.type)
            if layout is None:
                return (self._inside(stmt),)
            self._sink.error(
                "TW005",
                f"'{stmt.targets[0]}' is shared memory for structs",
                stmt.span,
                "make one shared array for each field",
            )
            return ()
        assert stmt.value is not None
        if not stmt.destructure:
            (name,) = stmt.targets
            if name not in self.structs:
                return (replace(stmt, value=self.plain(stmt.value), type=stmt.type),)
            target = self._named(name, stmt.span)
            pairs = self._pairs(target, self.value(stmt.value), stmt.span)
            return tuple(
                replace(stmt, targets=(leaf.id,), value=value, type=None)
                for leaf, value in pairs
                if isinstance(leaf, syntax.Name)
            )
        value = self._several(stmt.value, len(stmt.targets))
        if isinstance(value, Node):
            return (replace(stmt, value=value),)
        flat: list[tuple[Expr, Expr]] = []
        for name, item in zip(stmt.targets, value, strict=True):
            flat += (
                self._pairs(self._named(name, stmt.span), item, stmt.span)
                if name in self.structs
                else [(syntax.Name(name), self._as_plain(item, stmt.span))]
            )
        names = tuple(target.id for target, _ in flat if isinstance(target, syntax.Name))
        return (replace(stmt, targets=names, value=syntax.Tuple(tuple(v for _, v in flat), span=stmt.value.span)),)

    def _assign(self, stmt: syntax.Assign) -> tuple[Stmt, ...]:
        if isinstance(stmt.target, syntax.Tuple) and not stmt.op:
            value = self._several(stmt.value, len(stmt.target.items))
            if isinstance(value, Node):
                return (replace(stmt, target=self._inside(stmt.target), value=value),)
            pairs: list[tuple[Expr, Expr]] = []
            for place, item in zip(stmt.target.items, value, strict=True):
                target = self._place(place)
                pairs += (
                    self._pairs(target, item, stmt.span)
                    if isinstance(target, StructParts)
                    else [(target, self._as_plain(item, stmt.span))]
                )
            return self._stores(stmt, pairs, True)
        target = self._place(stmt.target)
        if not isinstance(target, StructParts):
            return (replace(stmt, target=target, value=self.plain(stmt.value)),)
        if stmt.op:
            self._refuse(target.layout, stmt.target.span, f"'{stmt.op}=' on")
            return ()
        given: Expr | StructParts | list[Expr | StructParts] = (
            self.value(stmt.value)
            if not isinstance(stmt.value, syntax.Tuple)
            else self._several(stmt.value, len(target.layout.fields))
        )
        return self._stores(stmt, self._pairs(target, given, stmt.span), False)

    def _place(self, node: Expr) -> Expr | StructParts:
        """What an assignment writes to: a field of an array is written, its name is not given to another one."""
        found = self.value(node)
        if isinstance(node, syntax.Name) or self._is_value(node):
            return found
        if isinstance(found, StructParts):
            return found.mapped(
                lambda leaf: syntax.Index(leaf, (), span=leaf.span) if isinstance(leaf, syntax.Name) else leaf,
                found.element,
            )
        return syntax.Index(found, (), span=node.span) if isinstance(found, syntax.Name) else found

    def _is_value(self, node: Expr) -> bool:
        """Whether a field is that of a variable that is one struct."""
        while isinstance(node, syntax.Attribute | syntax.Index):
            node = node.value
        return isinstance(node, syntax.Name) and node.id in self.structs and self.structs[node.id][1]

    @staticmethod
    def _stores(stmt: syntax.Assign, pairs: list[tuple[Expr, Expr]], together: bool) -> tuple[Stmt, ...]:
        """One assignment for each pair; all values first where one of them reads what another writes."""
        for position, (_, value) in enumerate(pairs):
            read = {n.id for n in nodes(value) if isinstance(n, syntax.Name)}
            together = together or any(_base(target) in read for target, _ in pairs[:position])
        if together and len(pairs) > 1:
            return (
                replace(
                    stmt,
                    target=syntax.Tuple(tuple(t for t, _ in pairs), span=stmt.target.span),
                    value=syntax.Tuple(tuple(v for _, v in pairs), span=stmt.value.span),
                ),
            )
        return tuple(replace(stmt, target=target, value=value) for target, value in pairs)

    def _several(self, node: Expr, count: int) -> Expr | list[Expr | StructParts]:
        """What several targets are given, where structs are among it; else the expression itself."""
        if isinstance(node, syntax.Tuple):
            items = [self.value(item) for item in node.items]
            if len(items) != count or not any(isinstance(item, StructParts) for item in items):
                plain = [self._as_plain(item, node.span) for item in items]
                return plain if len(items) == count else replace(node, items=tuple(plain))  # type: ignore[return-value]
            return items
        found = self.value(node)
        if not isinstance(found, StructParts):
            return found
        if len(found.layout.fields) != count:
            self._sink.error(
                "TW016",
                f"{found.layout} has {len(found.layout.fields)} fields, and there are {count} targets",
                node.span,
            )
            return syntax.Broken(span=node.span)
        return [part for field in found.layout.fields if (part := found.at(field.name)) is not None]

    def _pairs(
        self, target: StructParts, value: Expr | StructParts | list[Expr | StructParts], span: Span
    ) -> list[tuple[Expr, Expr]]:
        """Which number each part of a struct is given."""
        if isinstance(value, list):
            if len(value) != len(target.layout.fields):
                self._sink.error(
                    "TW016",
                    f"{target.layout} has {len(target.layout.fields)} fields, and is given {len(value)} values",
                    span,
                )
                return []
            flat: list[tuple[Expr, Expr]] = []
            for field, item in zip(target.layout.fields, value, strict=True):
                part = target.at(field.name)
                flat += (
                    self._pairs(part, item, span)
                    if isinstance(part, StructParts)
                    else [(part, self._as_plain(item, span))]
                    if part is not None
                    else []
                )
            return flat
        if isinstance(value, StructParts):
            if [path for path, _ in value.layout.leaves()] != [path for path, _ in target.layout.leaves()]:
                self._sink.error(
                    "TW006",
                    f"{value.layout} does not fit {target.layout}: their fields differ",
                    span,
                    "assign the fields one by one",
                )
                return []
            return [(target.leaves[path], leaf) for path, leaf in value.leaves.items()]
        if isinstance(value, syntax.Tuple):
            return self._pairs(target, list(value.items), span)
        if not isinstance(value, syntax.Number | syntax.Bool) and all(
            isinstance(leaf, syntax.Name) for leaf in target.leaves.values()
        ):
            if not isinstance(value, syntax.Broken):
                self._sink.error(
                    "TW006",
                    f"a variable is {target.layout} here and something else elsewhere",
                    span,
                    "choose another name",
                )
            return []
        # As in NumPy: a number goes to every field.
        dtypes = dict(target.layout.leaves())
        return [
            (leaf, syntax.Bool(False, span=span) if dtypes[path].is_bool and value == syntax.Number(0) else value)
            for path, leaf in target.leaves.items()
        ]

    def _return(self, stmt: syntax.Return, node: Expr) -> syntax.Return:
        items = node.items if isinstance(node, syntax.Tuple) else (node,)
        values = [self.value(item) for item in items]
        self.results = tuple(value.layout if isinstance(value, StructParts) else None for value in values)
        flat = [
            leaf for value in values for leaf in (value.leaves.values() if isinstance(value, StructParts) else (value,))
        ]
        if not isinstance(node, syntax.Tuple) and len(flat) == 1:
            return replace(stmt, value=flat[0])
        return replace(stmt, value=syntax.Tuple(tuple(flat), span=node.span))

    def _expect(self, stmt: syntax.Expect) -> tuple[Stmt, ...]:
        """What a called kernel says of a parameter."""
        said = annotated_layout(stmt.type)
        value = self.value(stmt.value)
        if not isinstance(value, StructParts):
            if said is not None:
                self._sink.error("TW009", f"{stmt.name} must be {said[0]}", stmt.span)
                return ()
            return (replace(stmt, value=value),)
        if said is None:
            is_array = stmt.type is None or (
                isinstance(stmt.type, syntax.Name) and stmt.type.id.lower() in ("array", "tensor")
            )
            if not is_array:
                self._sink.error(
                    "TW009", f"{stmt.name} is given {value.layout}, and is annotated as something else", stmt.span
                )
            return ()
        if not said[0].fits(value.layout):
            self._sink.error("TW009", f"{stmt.name} must be {said[0]}, got {value.layout}", stmt.span)
            return ()
        if not said[1]:
            return ()
        dtypes = dict(value.layout.leaves())
        return tuple(
            replace(stmt, value=leaf, type=syntax.Index(syntax.Name(dtypes[path].name), said[1]))
            for path, leaf in value.leaves.items()
        )

    # -- expressions ------------------------------------------------------------------------------------------------

    def _named(self, name: str, span: Span) -> StructParts:
        layout, element = self.structs[name]
        return StructParts(
            layout, {path: syntax.Name(leaf, span=span) for path, leaf in self.names[name].items()}, element
        )

    def plain(self, node: Expr) -> Expr:
        """An expression that has to be numbers."""
        return self._as_plain(self.value(node), node.span)

    def _as_plain(self, value: Expr | StructParts, span: Span) -> Expr:
        if not isinstance(value, StructParts):
            return value
        self._refuse(value.layout, span, "arithmetic with")
        return syntax.Broken(span=span)

    def _refuse(self, layout: StructLayout, span: Span, what: str) -> None:
        first = layout.fields[0].name
        self._sink.error("TW006", f"{what} a whole struct, {layout}", span, f"name one of its fields, as in .{first}")

    def _inside(self, item: Any) -> Any:
        """A node, or tuple, with its expressions rewritten."""
        if isinstance(item, tuple):
            return tuple(self._inside(part) if not _is_expression(part) else self.plain(part) for part in item)
        if not isinstance(item, Node):
            return item
        values = {f.name: getattr(item, f.name) for f in dataclasses.fields(item) if f.name != "span"}
        changed = {
            n: self.plain(v) if _is_expression(v) else self._inside(v)
            for n, v in values.items()
            if isinstance(v, Node | tuple)
        }
        return replace(item, **changed)  # type: ignore[arg-type]

    def value(self, node: Expr) -> Expr | StructParts:
        """An expression: the parts of a struct where it is one."""
        if isinstance(node, syntax.Name):
            return self._named(node.id, node.span) if node.id in self.structs else node
        if isinstance(node, syntax.Attribute):
            return self._attribute(node)
        if isinstance(node, syntax.Index):
            return self._index(node)
        if isinstance(node, syntax.IfExpr):
            cond, then, otherwise = self.plain(node.cond), self.value(node.then), self.value(node.otherwise)
            if not isinstance(then, StructParts) and not isinstance(otherwise, StructParts):
                return replace(node, cond=cond, then=then, otherwise=otherwise)
            if (
                not isinstance(then, StructParts)
                or not isinstance(otherwise, StructParts)
                or not then.layout.fits(otherwise.layout)
            ):
                shown = [
                    str(side.layout) if isinstance(side, StructParts) else "a number" for side in (then, otherwise)
                ]
                self._sink.error(
                    "TW006",
                    f"the sides of a choice are {shown[0]} and {shown[1]}",
                    node.span,
                    "make both the same struct",
                )
                return syntax.Broken(span=node.span)
            leaves = {
                path: syntax.IfExpr(cond, leaf, otherwise.leaves[path], span=node.span)
                for path, leaf in then.leaves.items()
            }
            return StructParts(then.layout, leaves, True)
        if isinstance(node, syntax.Call):
            return self._call(node)
        if isinstance(node, syntax.Binary) and node.op in ("==", "!="):
            left, right = self.value(node.left), self.value(node.right)
            if isinstance(left, StructParts) and isinstance(right, StructParts) and [*left.leaves] == [*right.leaves]:
                return self._compared(node, left, right)
            return replace(
                node, left=self._as_plain(left, node.left.span), right=self._as_plain(right, node.right.span)
            )
        if isinstance(node, syntax.IsNone):
            found = self.value(node.value)
            return replace(node, value=found.first() if isinstance(found, StructParts) else found)
        if isinstance(node, syntax.StructType):
            self._sink.error(
                "TW005",
                f"{node.layout} itself is no value",
                node.span,
                f"call it, {node.layout.name or 'S'}(…), or give it as a dtype",
            )
            return syntax.Broken(span=node.span)
        return self._inside(node)  # type: ignore[no-any-return]

    @staticmethod
    def _compared(node: syntax.Binary, left: StructParts, right: StructParts) -> Expr:
        """Equal where all fields are."""
        found: Expr | None = None
        for path, leaf in left.leaves.items():
            one = replace(node, left=leaf, right=right.leaves[path])
            found = (
                one if found is None else syntax.Binary("and" if node.op == "==" else "or", found, one, span=node.span)
            )
        assert found is not None
        return found

    def _attribute(self, node: syntax.Attribute) -> Expr | StructParts:
        around = self.value(node.value)
        if not isinstance(around, StructParts):
            return replace(node, value=around)
        about = node.name in _ABOUT_ARRAYS and not (around.element and around.layout.field(node.name) is not None)
        if about:
            return replace(node, value=around.first())
        if node.name == "dtype" and around.layout.field("dtype") is None:
            self._sink.error(
                "TW006",
                f"the dtype of {around.layout} is that of no number",
                node.span,
                f"write .{around.layout.fields[0].name}.dtype",
            )
            return syntax.Broken(span=node.span)
        return self._field(around, node.name, node.span)

    def _field(self, around: StructParts, name: str, span: Span) -> Expr | StructParts:
        found = around.at(name)
        if found is None:
            fields = [f.name for f in around.layout.fields]
            near = close_matches(name, fields, 1)
            hint = f"did you mean '{near[0]}'? " if near else ""
            self._sink.error(
                "TW002", f"{around.layout} has no field '{name}'", span, f"{hint}its fields are {', '.join(fields)}"
            )
            return syntax.Broken(span=span)
        if isinstance(found, StructParts):
            return found.mapped(lambda leaf: replace(leaf, span=span), found.element)
        return replace(found, span=span)

    def _index(self, node: syntax.Index) -> Expr | StructParts:
        around = self.value(node.value)
        indices = (
            tuple(i if isinstance(i, syntax.String) else self.plain(i) for i in node.indices)
            if isinstance(around, StructParts)
            else self._inside(node.indices)
        )
        assert isinstance(indices, tuple)
        if not isinstance(around, StructParts):
            return replace(node, value=around, indices=indices)
        name = _field_name(node)
        if name is not None:
            return self._field(around, name, node.span)
        if any(isinstance(i, syntax.List) and any(isinstance(p, syntax.String) for p in i.items) for i in indices):
            self._sink.error(
                "TW005", "several fields at once are not available in a kernel", node.span, "name them one by one"
            )
            return syntax.Broken(span=node.span)
        return around.mapped(
            lambda leaf: syntax.Index(leaf, indices, span=node.span), around.element or _is_element(node)
        )

    def _call(self, node: syntax.Call) -> Expr | StructParts:
        if isinstance(node.function, syntax.StructType):
            return self._construct(node.function.layout, node)
        layout = self._made(node)
        if layout is not None:
            return self._make(layout, node)
        if isinstance(node.function, syntax.Name) and node.function.id == "len" and len(node.args) == 1:
            found = self.value(node.args[0].value)
            return replace(
                node, args=(replace(node.args[0], value=found.first() if isinstance(found, StructParts) else found),)
            )
        if isinstance(node.function, syntax.Name) and node.function.id.endswith("_like") and node.args:
            found = self.value(node.args[0].value)
            if isinstance(found, StructParts) and _dtype_argument(node) is not None:
                rest = self._inside(node.args[1:])
                assert isinstance(rest, tuple)
                return replace(node, args=(replace(node.args[0], value=found.first()), *rest))
        return self._inside(node)  # type: ignore[no-any-return]

    def _construct(self, layout: StructLayout, node: syntax.Call) -> StructParts:
        """`Particle(1.0, y=2.0)`: what is not given is the field's default, or 0."""
        given: dict[str, Expr | StructParts] = {}
        fields = [f.name for f in layout.fields]
        positional = [a for a in node.args if a.keyword is None]
        if len(positional) > len(fields):
            self._sink.error("TW016", f"{layout} has {len(fields)} fields, got {len(positional)} values", node.span)
        for name, argument in [
            *zip(fields, positional),
            *((a.keyword or "", a) for a in node.args if a.keyword is not None),
        ]:
            if name not in fields:
                near = close_matches(name, fields, 1)
                self._sink.error(
                    "TW002",
                    f"{layout} has no field '{name}'",
                    argument.span,
                    f"did you mean '{near[0]}'?" if near else f"its fields are {', '.join(fields)}",
                )
            elif name in given:
                self._sink.error("TW016", f"{layout} is given '{name}' twice", argument.span)
            else:
                given[name] = self.value(argument.value)
        leaves: dict[Path, Expr] = {}
        for field in layout.fields:
            leaves |= {
                (field.name, *path): value
                for path, value in self._filled(field.type, given.get(field.name), field.default, node).items()
            }
        return StructParts(layout, leaves, True)

    def _filled(
        self,
        type_: DType | StructLayout,
        value: Expr | StructParts | None,
        default: bool | int | float,
        node: syntax.Call,
    ) -> dict[Path, Expr]:
        """The numbers of one field of a struct that is made, in its dtypes."""
        if isinstance(type_, StructLayout):
            if isinstance(value, StructParts) and value.layout.fits(type_):
                return dict(value.leaves)
            if value is not None:
                got = str(value.layout) if isinstance(value, StructParts) else "a number"
                self._sink.error("TW006", f"a field is {type_}, got {got}", node.span)
            return {
                (f.name, *path): leaf
                for f in type_.fields
                for path, leaf in self._filled(f.type, None, f.default, node).items()
            }
        if value is None:
            number = (
                syntax.Bool(bool(default), span=node.span) if type_.is_bool else syntax.Number(default, span=node.span)
            )
            return {(): number if type_.is_bool else _converted(number, type_, node.span)}
        plain = self._as_plain(value, node.span)
        return {(): plain if type_.is_bool else _converted(plain, type_, node.span)}

    def _make(self, layout: StructLayout, node: syntax.Call) -> StructParts:
        """An array for each field."""
        argument = _dtype_argument(node)
        leaves: dict[Path, Expr] = {}
        first = self.value(node.args[0].value)
        assert isinstance(node.function, syntax.Name)
        like = node.function.id.endswith("_like")
        for path, dtype in layout.leaves():
            shape = (
                first.leaves.get(path, first.first())
                if like and isinstance(first, StructParts)
                else self._as_plain(first, node.span)
            )
            rest: list[syntax.Argument] = [a for a in node.args[1:] if a is not argument]
            said = (
                []
                if like and argument is None
                else [syntax.Argument(syntax.Name(dtype.name, span=node.span), "dtype", span=node.span)]
            )
            leaves[path] = replace(node, args=(replace(node.args[0], value=shape), *rest, *said))
        return StructParts(layout, leaves, False)


def _converted(value: Expr, dtype: DType, span: Span) -> Expr:
    """A value in the dtype of its field."""
    return syntax.Call(
        syntax.Name("cast", span=span),
        (syntax.Argument(value, span=value.span), syntax.Argument(syntax.Name(dtype.name, span=span), span=span)),
        span=span,
    )


def _is_expression(item: object) -> TypeGuard[Expr]:
    return isinstance(item, syntax.Expr) and not isinstance(item, syntax.Slice | syntax.Rest)


def _field_name(node: syntax.Index) -> str | None:
    (only,) = node.indices if len(node.indices) == 1 else (None,)
    return only.value if isinstance(only, syntax.String) else None


def _is_element(node: Expr) -> bool:
    """Whether an expression is one struct, as far as it shows: an element, or one that is made."""
    if isinstance(node, syntax.Index):
        return (
            _field_name(node) is None
            and bool(node.indices)
            and not any(isinstance(i, syntax.Slice | syntax.Rest | syntax.Nothing) for i in node.indices)
        )
    return isinstance(node, syntax.Call) and isinstance(node.function, syntax.StructType)


def _dtype_argument(call: syntax.Call) -> syntax.Argument | None:
    """The dtype of a call that makes an array."""
    position = 1
    named = next((a for a in call.args if a.keyword == "dtype"), None)
    positional = [a for a in call.args if a.keyword is None]
    return named or (positional[position] if len(positional) > position else None)


def _assigned(node: Node) -> Sequence[tuple[str, Expr]]:
    """The names that a statement assigns, with what."""
    if isinstance(node, syntax.Let) and node.value is not None:
        if not node.destructure:
            return [(node.targets[0], node.value)]
        items = node.value.items if isinstance(node.value, syntax.Tuple) else ()
        return list(zip(node.targets, items, strict=False)) if len(items) == len(node.targets) else []
    if isinstance(node, syntax.Assign) and not node.op:
        if isinstance(node.target, syntax.Name):
            return [(node.target.id, node.value)]
        if isinstance(node.target, syntax.Tuple) and isinstance(node.value, syntax.Tuple):
            return [
                (t.id, v)
                for t, v in zip(node.target.items, node.value.items, strict=False)
                if isinstance(t, syntax.Name)
            ]
    return []


def _written(body: tuple[Stmt, ...]) -> set[str]:
    """The variables that are assigned to, also by other names for them."""
    found: set[str] = set()
    same: list[tuple[str, str]] = []
    for node in nodes(body):
        if isinstance(node, syntax.Assign):
            found |= {
                _base(t) for t in (node.target.items if isinstance(node.target, syntax.Tuple) else (node.target,))
            }
        same += [
            (name, _base(value))
            for name, value in _assigned(node)
            if isinstance(value, syntax.Name) or (isinstance(value, syntax.Index) and not _is_element(value))
        ]
    count = -1
    while count != len(found):
        count = len(found)
        found |= {other for name, other in same if name in found}
    return found


def _base(target: Expr) -> str:
    """The variable that an assignment writes to."""
    while isinstance(target, syntax.Index | syntax.Attribute):
        target = target.value
    return target.id if isinstance(target, syntax.Name) else ""
