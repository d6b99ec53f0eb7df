"""Functions of ZynML as something a kernel can call: `compute` blocks in them become statements.

In: a `fn` or `pipeline`, the others of its program, and which names the program gives values. Out: a function without blocks whose calls of
others are `Callee`s, for `inline.py`; so what a function computes in several blocks is one program, whose loops are fused:

    fn layer(x, w):                                          makes h
        let h = compute(x, w) { … out[i, j] = sum }    ->    … h[i, j] = sum
        return relu(h)                                       made h
                                                             return relu(h)

A block's names get new ones where they meet others. Names that nothing declares are sizes of the block, or of the function. A function that
cannot be part of a kernel, because a block in it has a device of its own say, is told by `Apart`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from tilewright.base.errors import Diagnostics, UserError
from tilewright.base.source import Span
from tilewright.tree import syntax
from tilewright.tree.inline import declared, inline, nodes, reduced_into, renamed
from tilewright.tree.kind_claims import check_claim
from tilewright.tree.metadata import KernelKind, read_attributes
from tilewright.tree.names import BodyNames, body_names, is_output, substitute
from tilewright.tree.syntax import Argument, Expr, Function, KernelAttribute, Stmt

COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
_OWN_PROGRAM = (
    "device", "precision", "optimize", "strict", "tile", "async", "parallel", "workgroup", "shared", "max_registers", "vector", "unroll",
    "tensor_cores", "async_copy", "gpu_compute", "vectorizable", "unchecked", "deterministic", "activations",
)  # fmt: skip
"""Attributes of a block that hold for all of a program."""
_OWN_SIZES = (KernelKind.CONV2D, KernelKind.CONV2D_DEPTHWISE)
"""Kinds that give names to sizes."""
_PRIMITIVES = (KernelKind.SCAN, KernelKind.SORT, KernelKind.FILTER, KernelKind.HISTOGRAM)
SIZED_KINDS = (*_OWN_SIZES, KernelKind.ATTENTION, KernelKind.FLASH_ATTENTION)
"""Kinds whose blocks may name sizes that are no bounds of loops."""
_ARRAY_PARTS = ("shape", "size", "ndim", "dtype", "T")


class Apart(Exception):
    """The function's blocks cannot be one program; the text says why."""

    def __init__(self, reason: str, span: Span) -> None:
        super().__init__(reason)
        self.span = span


class Composer:
    """Makes functions callable, each once. `is_known` says whether the program gives a name a value."""

    def __init__(
        self, functions: Mapping[str, Function], is_known: Callable[[str], bool], sink: Diagnostics,
        is_host_call: Callable[[syntax.Call], bool] = lambda call: False, library: Mapping[str, Callable[[syntax.Call], syntax.Call]] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """`library` gives calls of words that are kernels themselves as calls of those."""
        self._functions = functions
        self.is_host_call = is_host_call
        self._library = library
        self._is_known = is_known
        self._sink = sink
        self._open: list[str] = []

    def linked(self, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        """Statements of a compute block with `Callee`s for the functions they call."""
        if not any(isinstance(n, syntax.Name) and (n.id in self._functions or n.id in self._library) for n in nodes(body)):
            return body
        return _Linker(self).statements(body)

    def callee(self, name: str, span: Span) -> Expr:
        """The function of that name for a call. Raises Apart."""
        if name in self._open:
            chain = " calls ".join(f"'{n}'" for n in (*self._open[self._open.index(name) :], name))
            self._sink.error("TW005", f"{chain}: a function cannot call itself", span, "use a loop in a compute block")
            return syntax.Name(name, span=span)
        function = self._functions[name]
        if any(attribute.name == "device" for attribute in function.attributes):
            raise Apart(f"'{name}' says where it runs", function.span)
        types = [n for p in function.params if p.type is not None for n in nodes(p.type)]
        if any(isinstance(n, syntax.Slice) or (isinstance(n, syntax.Binary) and n.op in COMPARISONS) for n in types):
            raise Apart(f"a type of '{name}' has bounds", function.span)
        self._open.append(name)
        try:
            return syntax.Callee(inline(self.flat(self._functions[name]), self._sink), span=span)
        finally:
            self._open.pop()

    def expanded(self, call: syntax.Call) -> syntax.Call:
        """A call of a word that is a kernel itself as a call of that kernel."""
        expand = None if self.is_function(call.function) or not isinstance(call.function, syntax.Name) else self._library.get(call.function.id)
        if expand is None:
            return call
        try:
            return expand(call)
        except UserError as error:
            for said in error.diagnostics:
                self._sink.error(said.code, said.message, said.span, said.help)
            return call

    def is_function(self, node: Expr) -> bool:
        return isinstance(node, syntax.Name) and node.id in self._functions

    def is_known(self, name: str) -> bool:
        return self._is_known(name)

    def check_claim(self, kind: KernelKind, node: syntax.Compute) -> None:
        if not any(self.is_function(n.function) for n in nodes(node.body) if isinstance(n, syntax.Call)):
            check_claim(kind, node.attributes, node.body, self._sink)

    def flat(self, function: Function) -> Function:
        return _Flattener(self, function).run()


class _Linker:
    """Replaces the names of functions in calls."""

    def __init__(self, composer: Composer) -> None:
        self.composer = composer

    def statements(self, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        return tuple(self.any(stmt) for stmt in body)  # type: ignore[misc]

    def any(self, item: object) -> object:
        if isinstance(item, tuple):
            return tuple(self.any(part) for part in item)
        if not isinstance(item, syntax.Node):
            return item
        if isinstance(item, syntax.Pipe):
            first = Argument(item.value, span=item.value.span)
            item = replace(item.call, args=(first, *item.call.args), span=item.span)
        if isinstance(item, syntax.Call):
            item = self.composer.expanded(item)
        if isinstance(item, syntax.Callee):
            return item
        if isinstance(item, syntax.Compute):
            return self.compute(item)
        values = {name: value for name, value in vars(item).items() if name != "span"}
        if isinstance(item, syntax.Call) and self.composer.is_function(item.function):
            assert isinstance(item.function, syntax.Name)
            values = {"function": self.composer.callee(item.function.id, item.function.span), "args": self.any(item.args)}
        else:
            values = {name: self.any(value) for name, value in values.items()}
        return type(item)(**values, span=item.span)

    def compute(self, node: syntax.Compute) -> object:
        raise Apart("a compute block inside another", node.span)


class _Flattener(_Linker):
    """One function; `before` are the statements of blocks that the statement at hand needs."""

    def __init__(self, composer: Composer, function: Function) -> None:
        super().__init__(composer)
        self._function = function
        self._taken = {p.name for p in function.params} | {n.id for n in nodes((function.params, function.body)) if isinstance(n, syntax.Name)}
        self._taken |= set(declared(function.body))
        self._scope = {p.name for p in function.params}
        self._scope |= {n.id for p in function.params if p.type is not None for n in nodes(p.type) if isinstance(n, syntax.Name)}
        self._sizes: dict[str, None] = {}
        self._before: list[Stmt] = []
        self._targets: tuple[str, ...] = ()

    def run(self) -> Function:
        body: list[Stmt] = []
        for stmt in self._function.body:
            if not isinstance(stmt, syntax.Let | syntax.Return) or (isinstance(stmt, syntax.Let) and (stmt.shared or stmt.value is None)):
                raise Apart("only let and return can be between the blocks of one program", stmt.span)
            if isinstance(stmt, syntax.Let) and self._scope & set(stmt.targets):
                raise Apart(f"'{stmt.targets[0]}' is declared twice", stmt.span)
            self._before = []
            body += self._statement(stmt)
            if isinstance(stmt, syntax.Let):
                self._scope |= set(stmt.targets)
        return replace(self._function, body=tuple(body), sizes=tuple(self._sizes))

    def _statement(self, stmt: syntax.Let | syntax.Return) -> list[Stmt]:
        if isinstance(stmt, syntax.Let) and isinstance(stmt.value, syntax.Compute):
            self._block(stmt.value, stmt.targets)
            return self._before
        new = self.any(stmt)
        return [*self._before, new]  # type: ignore[list-item]

    def any(self, item: object) -> object:
        if isinstance(item, syntax.Attribute) and item.name not in _ARRAY_PARTS:
            raise Apart(f"'.{item.name}' is no part of an array", item.span)
        if isinstance(item, syntax.Await | syntax.Record | syntax.String):
            raise Apart("it has values that kernels do not have", item.span)
        if isinstance(item, syntax.Call) and self.composer.is_host_call(item):
            raise Apart("it calls a function of the host", item.span)
        return super().any(item)

    def compute(self, node: syntax.Compute) -> object:
        outputs = tuple(self._fresh(f"{self._function.name}_out", "block") for _ in range(max(1, len(_written(node.body)))))
        self._block(node, outputs)
        made = [syntax.Name(name, span=node.span) for name in outputs]
        return made[0] if len(made) == 1 else syntax.Tuple(tuple(made), span=node.span)

    def _fresh(self, name: str, owner: str) -> str:
        candidate, number = name, 1
        while candidate in self._taken:
            candidate = f"{owner}_{name}" if number == 1 else f"{owner}_{name}_{number}"
            number += 1
        self._taken.add(candidate)
        return candidate

    def _block(self, node: syntax.Compute, targets: tuple[str, ...]) -> None:
        """The statements of a block that fills the arrays called `targets`."""
        metadata = read_attributes(node.attributes, Diagnostics())
        self.composer.check_claim(metadata.kind, node)
        own = next((a for a in node.attributes if a.name in _OWN_PROGRAM), None)
        if own is not None:
            raise Apart(f"a block has @{own.name} of its own", own.span)
        if node.in_place:
            raise Apart(f"a block writes '{node.in_place[0]}' in place", node.span)
        if metadata.kind in _PRIMITIVES:
            raise Apart(f"a block is @kernel {metadata.kind.value}, which takes all of its values at once", node.span)
        if metadata.kind in _OWN_SIZES:
            raise Apart(f"a block is @kernel {metadata.kind.value}, which names its sizes", node.span)
        replaced: list[tuple[Expr, syntax.Name]] = []
        for item in node.inputs:
            if not isinstance(item, syntax.Name):
                name = self._fresh("given", targets[0])
                self._before.append(syntax.Let((name,), self.any(item), span=item.span))  # type: ignore[arg-type]
                self._scope.add(name)
                replaced.append((item, syntax.Name(name, span=item.span)))
        body = substitute(node.body, replaced)
        names = self._block_names(body_names(body), declared(body), targets[0], metadata.kind in SIZED_KINDS)
        written = _written(body) if metadata.kind is not KernelKind.REDUCE else ("out",)
        if len(written) != len(targets):
            raise Apart(f"{len(targets)} name(s) for {len(written)} output(s)", node.span)
        names |= {old: syntax.Name(new) for old, new in zip(written, targets, strict=True)}
        linked = self.statements(body)
        if metadata.kind is KernelKind.REDUCE:
            *front, nest = linked
            if not isinstance(nest, syntax.For):
                raise Apart("a reduce block does not end in its loops", node.span)
            linked = (*front, *reduced_into("out", nest, metadata))
            self._before += renamed(linked, names)
            return
        self._before.append(syntax.Made(targets, span=node.span))
        self._before += renamed(linked, names)
        self._before.append(syntax.Made(targets, True, span=node.span))

    def _block_names(self, names: BodyNames, own: Mapping[str, None], owner: str, sized: bool) -> dict[str, Expr]:
        """New names for what a block declares and for sizes only it knows; other names are values of the program."""
        found: dict[str, Expr] = {name: syntax.Name(self._fresh(name, owner)) for name in own}
        for name in names.free:
            if name in own or name in self._scope or self.composer.is_known(name) or not (sized or name in names.in_ranges):
                continue
            new = self._fresh(f"{name}_", owner) if name in self._sizes else name
            found[name] = syntax.Name(new)
            self._sizes[new] = None
        return found


def _written(body: tuple[Stmt, ...]) -> tuple[str, ...]:
    """The outputs of a block, in the order of their first stores."""
    found: dict[str, None] = {}
    for node in nodes(body):
        if isinstance(node, syntax.Assign):
            base = node.target
            while isinstance(base, syntax.Index | syntax.Attribute):
                base = base.value
            if isinstance(base, syntax.Name) and is_output(base.id):
                found[base.id] = None
    return tuple(found)


def kernel_of(label: str, params: tuple[syntax.Param, ...], value: Expr, sink: Diagnostics) -> Function:
    """A kernel whose outputs are what the expression, which may call functions, gives."""
    span = value.span
    shell = Function(label, params, None, (syntax.Return(value, span=span),), "compute", _fused(span), span=span)
    done = inline(shell, sink)
    *body, last = done.body
    assert isinstance(last, syntax.Return)
    assert last.value is not None
    values = last.value.items if isinstance(last.value, syntax.Tuple) else (last.value,)
    names = ("out",) if len(values) == 1 else tuple(f"out_{n}" for n in range(len(values)))
    for name, result in zip(names, values, strict=True):
        body = _assigned(body, name, result)
    return replace(done, body=tuple(body), options=((syntax.OUTPUT_ORDER, names),))


def call_of(callee: Expr, params: tuple[syntax.Param, ...], span: Span) -> Expr:
    """A call with the parameters themselves."""
    return syntax.Call(callee, tuple(Argument(syntax.Name(p.name, span=p.span), span=p.span) for p in params), span=span)


def _fused(span: Span) -> tuple[KernelAttribute, ...]:
    return (KernelAttribute("kernel", (Argument(syntax.Name("fused", span=span), span=span),), span=span),)


def _assigned(body: list[Stmt], name: str, value: Expr) -> list[Stmt]:
    """The statements with `name` as the output that has the value: the array itself where only the result needs it."""
    made = any(isinstance(s, syntax.Made) and isinstance(value, syntax.Name) and value.id in s.names for s in body)
    if made and isinstance(value, syntax.Name) and not _read(body, value.id):
        kept = [replace(s, names=tuple(n for n in s.names if n != value.id)) if isinstance(s, syntax.Made) else s for s in body]
        return list(renamed(tuple(s for s in kept if not isinstance(s, syntax.Made) or s.names), {value.id: syntax.Name(name)}))
    return [*body, syntax.Assign(syntax.Name(name, span=value.span), value, span=value.span)]


def _read(body: list[Stmt], name: str) -> bool:
    stored = {id(n.target) for n in nodes(tuple(body)) if isinstance(n, syntax.Assign)}
    stored |= {id(n.target.value) for n in nodes(tuple(body)) if isinstance(n, syntax.Assign) and isinstance(n.target, syntax.Index)}
    return any(isinstance(n, syntax.Name) and n.id == name and id(n) not in stored for n in nodes(tuple(body)))
