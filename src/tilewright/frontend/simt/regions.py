"""Loops of ordinary Python code that become kernels: from a `for` in a running frame to the source of an explicit kernel.

In: where a frame is about to iterate, or a function that stands for such a loop. Out: the loop's own definition and which names of its
surroundings it reads; `outline` makes the function of it that the front end of explicit kernels takes, one thread for each number:

    for i in tw.parallel_gpu(n, 256):          def region($start, a, x, y):
        if x[i] < 0:                                i = $start + $thread()
            continue                                if x[i] < 0:
        y[i] = a * x[i] + y[i]                          return
                                                    y[i] = a * x[i] + y[i]

A loop that combines something into names (`reductions`) becomes a function in which each block takes `$chunk` numbers in a row, each of its
threads every `$block`-th of them, and leaves what it has in an array:

    for i in tw.prange(n):                      def region($count, $chunk, $block, $start, x, $first_total, $parts_total):
        total += x[i]                               total = $first_total
                                                    $base = $thread() // $block * $chunk
                                                    for $number in range($base + $thread() % $block, $min($base + $chunk, $count), $block):
                                                        i = $start + $number
                                                        total += x[i]
                                                    $parts_total[$thread()] = total
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from types import FrameType

from tilewright.base.errors import UserError
from tilewright.base.source import Source, Span
from tilewright.frontend.python.expressions import SourcePlace
from tilewright.frontend.python.sources import lines_of, missing_source
from tilewright.frontend.simt.reductions import LoopReduction, find_reduction
from tilewright.frontend.simt.source import FunctionSource

START, THREAD, EXTENT = "$start", "$thread", "$extent"
COUNT, CHUNK, BLOCK, FIRST, PARTS = "$count", "$chunk", "$block", "$first_", "$parts_"
_RANGE, _MIN, _NUMBER, _BASE = "$range", "$min", "$number", "$base"


@dataclass(frozen=True, eq=False)
class RegionLoop:
    """A marked loop: the names it counts with, its statements, and the names it reads or writes that are not its own."""

    name: str
    targets: tuple[str, ...]
    body: tuple[ast.stmt, ...]
    place: SourcePlace
    head: Span
    node: ast.stmt
    reads: tuple[str, ...]
    reductions: tuple[LoopReduction, ...] = ()
    """Names around it that it combines something into."""


def loop_of_frame(frame: FrameType, what: str) -> RegionLoop:
    """The `for` whose iterator the frame asks for. Raises `UserError` where it is not one, or cannot be read."""
    code = frame.f_code
    lines = lines_of(code, frame.f_globals)
    if not lines:
        raise missing_source(what, code, "loop")
    text = "".join(lines)
    place = SourcePlace(Source(code.co_filename, text, 1))
    line, _, column, _ = list(code.co_positions())[frame.f_lasti // 2]
    node = next((n for n in _loops(text) if (line, column) in ((n.lineno, n.col_offset), (n.iter.lineno, n.iter.col_offset))), None)
    if node is None:
        span = Span(place.source, line or 1, 1, line or 1, 1)
        raise UserError.at("TW005", f"{what} is not what a 'for' goes over", span, f"write: for i in {what}:")
    if node.orelse:
        raise UserError.at("TW005", "'else' of a loop that becomes a kernel", place.span(node.orelse[0]), "write it after the loop")
    return _loop(f"loop_{node.lineno}", _names(node.target, place), node, place)


def loop_of_function(source: FunctionSource) -> RegionLoop:
    """A function that stands for a loop: its parameters are what it counts with."""
    node = source.node
    if isinstance(node, ast.Lambda):
        raise UserError.at("TW005", "a lambda is no region", source.head(), "write it as a function with 'def'")
    arguments = [*node.args.posonlyargs, *node.args.args]
    if node.args.vararg or node.args.kwarg or node.args.kwonlyargs or node.args.defaults:
        raise UserError.at("TW005", "a region takes only the numbers it counts with", source.head())
    return _loop(node.name, tuple(a.arg for a in arguments), node, source.place)


@lru_cache(maxsize=64)
def _loops(text: str) -> tuple[ast.For, ...]:
    return tuple(n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.For))


def _names(target: ast.expr, place: SourcePlace) -> tuple[str, ...]:
    items = target.elts if isinstance(target, ast.Tuple) else [target]
    names = [item.id for item in items if isinstance(item, ast.Name)]
    if len(names) != len(items):
        raise UserError.at("TW005", "the loop counts with something else than names", place.span(target), "use names such as i")
    return tuple(names)


def _loop(name: str, targets: tuple[str, ...], node: ast.For | ast.FunctionDef, place: SourcePlace) -> RegionLoop:
    body = [_Continues(place).visit(deepcopy(stmt)) for stmt in node.body] if isinstance(node, ast.For) else node.body
    # A function's names are its own unless it says otherwise.
    declared = [s for s in body if isinstance(s, ast.Global | ast.Nonlocal)] if isinstance(node, ast.FunctionDef) else []
    outer = {n for s in declared for n in s.names} if isinstance(node, ast.FunctionDef) else None
    scan = _Scan(place, targets, outer)
    scan.block(body, set(targets))
    reduced = {reduction.name for reduction in scan.reductions}
    body = [s for s in body if s not in declared or not reduced.issuperset(s.names)]
    if reduced:
        for stmt in body:
            if isinstance(stmt, ast.For | ast.While):
                _refuse_returns(stmt, place)
    return RegionLoop(name, targets, tuple(body), place, place.head(node), node, tuple(scan.reads), tuple(scan.reductions))


class _Continues(ast.NodeTransformer):
    """Statements of a loop as those of a function: `continue` ends the thread. What would end other iterations is refused."""

    def __init__(self, place: SourcePlace) -> None:
        self.place = place

    def visit_Continue(self, node: ast.Continue) -> ast.stmt:
        return ast.copy_location(ast.Return(None), node)

    def visit_Break(self, node: ast.Break) -> ast.stmt:
        raise UserError.at(
            "TW005", "'break' ends iterations that run at the same time", self.place.span(node), "use 'continue', or a plain loop"
        )

    def visit_Return(self, node: ast.Return) -> ast.stmt:
        raise UserError.at("TW005", "'return' inside a loop that becomes a kernel", self.place.span(node), "use 'continue'")

    def visit_For(self, node: ast.For) -> ast.stmt:
        _refuse_returns(node, self.place)
        return node

    def visit_While(self, node: ast.While) -> ast.stmt:
        _refuse_returns(node, self.place)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.stmt:
        return node


def _refuse_returns(node: ast.stmt, place: SourcePlace) -> None:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Return):
            raise UserError.at("TW005", "'return' inside a loop that becomes a kernel", place.span(inner), "use 'continue'")


class _Scan:
    """Names of the surroundings that a loop reads. A name it both sets and may read before that is carried from one iteration to the
    next, which iterations at the same time cannot do unless all of them only combine something into it. `outer`: the only names that
    can be; None for all."""

    def __init__(self, place: SourcePlace, targets: Sequence[str], outer: Collection[str] | None = None) -> None:
        self.place = place
        self.targets = targets
        self.outer = outer
        self.reads: dict[str, None] = {}
        self.reductions: list[LoopReduction] = []

    def block(self, body: Sequence[ast.stmt], known: set[str]) -> None:
        """Look at statements in order; `known` are names that are set by then, and grows."""
        stored = {n.id: n for stmt in body for n in ast.walk(stmt) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        stored.update({n.name: ast.copy_location(ast.Name(n.name), n) for stmt in body for n in ast.walk(stmt) if isinstance(n, ast.FunctionDef)})
        for name in dict.fromkeys(name for name, _ in self._early(body, known, stored)):
            self.reductions.append(self._reduction(name, body))
        for stmt in body:
            for node in ast.walk(stmt):
                if isinstance(node, ast.Name) and node.id not in stored and node.id not in self.targets:
                    self.reads[node.id] = None

    def _reduction(self, name: str, body: Sequence[ast.stmt]) -> LoopReduction:
        """A name that is carried, as what all iterations combine into."""
        found = find_reduction(name, body)
        if isinstance(found, LoopReduction) and (self.outer is None or name in self.outer):
            return found
        write, read = (found.place, found.place) if isinstance(found, LoopReduction) else (found.write, found.read)
        lines = [self.place.span(node).line for node in (write, read)]  # type: ignore[arg-type]
        message = f"written at line {lines[0]}, read at line {lines[1]}"
        if not isinstance(found, LoopReduction) and found.operations is not None:
            message = f"combined by '{found.operations[0]}' at line {lines[0]}, by '{found.operations[1]}' at line {lines[1]}"
        help = "iterations run at the same time: keep a value for each in an array, or only combine into it (+= *= max min and or) and read it after the loop"
        if isinstance(found, LoopReduction):
            help = f"write 'nonlocal {name}' in the function, or make it a loop"
        raise UserError.at("TW012", f"'{name}' is carried from one iteration to the next: {message}", self.place.span(read), help)  # type: ignore[arg-type]

    def _early(self, body: Sequence[ast.stmt], known: set[str], stored: Mapping[str, ast.Name]) -> Iterator[tuple[str, ast.Name]]:
        """Reads of names the loop sets that come before they are surely set."""
        for stmt in body:
            if isinstance(stmt, ast.If):
                yield from self._read(stmt.test, known, stored)
                first, second = set(known), set(known)
                yield from self._early(stmt.body, first, stored)
                yield from self._early(stmt.orelse, second, stored)
                ends = [names for part, names in ((stmt.body, first), (stmt.orelse, second)) if not _leaves(part)]
                known |= set.intersection(*ends) if ends else first | second
            elif isinstance(stmt, ast.For | ast.While):
                yield from self._read(stmt.iter if isinstance(stmt, ast.For) else stmt.test, known, stored)
                inner = set(known)
                if isinstance(stmt, ast.For):
                    inner |= {n.id for n in ast.walk(stmt.target) if isinstance(n, ast.Name)}
                yield from self._early(stmt.body, inner, stored)
            elif isinstance(stmt, ast.FunctionDef):
                known.add(stmt.name)
            else:
                yield from self._read(stmt, known, stored)
                if isinstance(stmt, ast.AugAssign) and isinstance(stmt.target, ast.Name) and stmt.target.id not in known:
                    yield stmt.target.id, stmt.target
                known |= {n.id for n in ast.walk(stmt) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}

    @staticmethod
    def _read(node: ast.AST, known: set[str], stored: Mapping[str, ast.Name]) -> Iterator[tuple[str, ast.Name]]:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load) and inner.id in stored and inner.id not in known:
                yield inner.id, inner


def _leaves(body: Sequence[ast.stmt]) -> bool:
    """Whether control surely leaves the loop's body here."""
    return bool(body) and isinstance(body[-1], ast.Return | ast.Continue | ast.Break | ast.Raise)


def outline(loop: RegionLoop, parameters: Sequence[str], same: Mapping[str, str], names: Mapping[str, object], step: int) -> FunctionSource:
    """The loop as a kernel's function over `parameters`, one thread for each number. `same` gives names that are another name's array."""
    return _function(loop, parameters, [*_firsts(loop), *_numbers(loop, _call(THREAD), step)], loop.body, [], same, names)


def outline_parts(loop: RegionLoop, parameters: Sequence[str], same: Mapping[str, str], names: Mapping[str, object], step: int) -> FunctionSource:
    """A loop with reductions as a kernel's function: each thread takes several numbers and leaves what it has in arrays."""
    base = ast.BinOp(ast.BinOp(_call(THREAD), ast.FloorDiv(), _read(BLOCK)), ast.Mult(), _read(CHUNK))
    begin = ast.BinOp(_read(_BASE), ast.Add(), ast.BinOp(_call(THREAD), ast.Mod(), _read(BLOCK)))
    end = _call(_MIN, ast.BinOp(_read(_BASE), ast.Add(), _read(CHUNK)), _read(COUNT))
    body = [*_numbers(loop, _read(_NUMBER), step), *(_Returns().visit(deepcopy(stmt)) for stmt in loop.body)]
    taken = ast.For(ast.Name(_NUMBER, ast.Store()), _call(_RANGE, begin, end, _read(BLOCK)), body, [])
    parts: list[ast.stmt] = []
    for reduction in loop.reductions:
        target = ast.Subscript(_read(PARTS + reduction.name), _call(THREAD), ast.Store())
        parts.append(ast.Assign([target], _read(reduction.name)))
    before = [*_firsts(loop), ast.Assign([ast.Name(_BASE, ast.Store())], base)]
    return _function(loop, parameters, before, [taken], parts, same, {**names, _RANGE: range, _MIN: min})


def _firsts(loop: RegionLoop) -> list[ast.stmt]:
    """What reductions begin with."""
    return [ast.Assign([ast.Name(r.name, ast.Store())], _read(FIRST + r.name)) for r in loop.reductions]


def _numbers(loop: RegionLoop, number: ast.expr, step: int) -> list[ast.stmt]:
    """What the loop counts with, from the number of the iteration."""
    made: list[ast.stmt] = []
    for axis, target in reversed(list(enumerate(loop.targets))):
        if axis == 0:
            value = number if len(loop.targets) > 1 else _counted(number, step)
        else:
            value = ast.BinOp(number, ast.Mod(), ast.Name(f"{EXTENT}{axis}", ast.Load()))
            number = ast.BinOp(number, ast.FloorDiv(), ast.Name(f"{EXTENT}{axis}", ast.Load()))
        made.append(ast.Assign([ast.Name(target, ast.Store())], value))
    return made


def _function(
    loop: RegionLoop, parameters: Sequence[str], before: Sequence[ast.stmt], body: Sequence[ast.stmt], after: Sequence[ast.stmt],
    same: Mapping[str, str], names: Mapping[str, object],
) -> FunctionSource:  # fmt: skip
    """A function of these statements. What is made here lies where the loop does."""
    arguments = [ast.arg(name) for name in parameters]
    whole = [*before, *(_Rename(same).visit(deepcopy(stmt)) if same else stmt for stmt in body), *after]
    node = ast.FunctionDef(loop.name, ast.arguments([], arguments, None, [], [], None, []), whole, [], None)
    for inner in ast.walk(node):
        if isinstance(inner, ast.stmt | ast.expr | ast.arg) and not hasattr(inner, "lineno"):
            ast.copy_location(inner, loop.node)
    return FunctionSource(loop.name, node, loop.place, names)


class _Returns(ast.NodeTransformer):
    """Statements of a function as those of a loop again: a thread that is done with a number takes the next one."""

    def visit_Return(self, node: ast.Return) -> ast.stmt:
        return ast.copy_location(ast.Continue(), node) if node.value is None else node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.stmt:
        return node


def _counted(number: ast.expr, step: int) -> ast.expr:
    scaled = number if step == 1 else ast.BinOp(number, ast.Mult(), ast.Constant(step))
    return ast.BinOp(ast.Name(START, ast.Load()), ast.Add(), scaled)


def _call(name: str, *arguments: ast.expr) -> ast.expr:
    return ast.Call(_read(name), list(arguments), [])


def _read(name: str) -> ast.expr:
    return ast.Name(name, ast.Load())


class _Rename(ast.NodeTransformer):
    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.copy_location(ast.Name(self.names.get(node.id, node.id), node.ctx), node)
