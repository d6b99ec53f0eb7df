"""Typed tree -> loop stage: one kernel per top-level nest, in order.

In comes a checked kernel; out comes a `Program` whose kernels hold sizes and constants, then one `parallel` over the nest's
domain (of rank 0 for full reductions and serial code). Inside stand loads, stores, arithmetic, `reduce` for declared
accumulations, and `for`/`if`/`while` for the rest. It is the first pass: everything after it works on IR alone.

    for i in range(rows):                 parallel %rows (%i) {
        total = 0.0                         %s = reduce %cols {kind = "add"} (%j) {
        for j in range(cols):       ->        %v = load %m, %i, %j
            total += m[i, j]                  yield %v }
        out[i] = total                      store %out, %i, %s }

A scalar computed between nests is not stored: each kernel that uses it computes it again from what was stored (a 0-d scratch
array for every accumulated variable). Elementwise code after a reduction over the same domain joins the reduction's kernel.
Narrow floats are widened to f32 after a load and rounded at a store.

The body of an ordered loop is lowered like the kernel's top, once; its calls are marked with the loop. The number of the step is a size there, so
that extents may depend on it. Variables that live from step to step have an array without axes.
"""

from __future__ import annotations

from dataclasses import replace

from tilewright.base.dtypes import DType, bool_, compute_dtype, i64
from tilewright.base.record import record
from tilewright.base.sizes import ZERO, Size, computed_name, is_number, maximum, parameter_of
from tilewright.ir.nodes import Kernel, Value, walk
from tilewright.ir.program import KernelCall, LoopTurn, OrderedLoop, Program, ProgramArray, ProgramCheck, ScalarInput
from tilewright.ir.rewrite import eliminate_dead
from tilewright.ir.specialise import substituted
from tilewright.passes.from_tree.lower_body import Draft, scalar_type, tensor_type
from tilewright.tree.bounds import range_under
from tilewright.tree.typed import (
    Accumulate,
    Apply,
    ArrayAssign,
    ArrayInfo,
    Cast,
    Choose,
    Element,
    Expr,
    Local,
    LoopVar,
    Picked,
    Reduce,
    ReduceLoop,
    ScalarInfo,
    SetVar,
    Stmt,
    TypedKernel,
    TypedLoop,
    TypedTurns,
    TypedWhile,
    Variable,
    Whole,
    row_major,
)
from tilewright.tree.typed_walk import assigned, walk_expr
from tilewright.tree.typed_walk import walk as walk_stmts


def lower_kernel(typed: TypedKernel) -> Program:
    """The program that computes what the typed kernel says."""
    return _TreeLowering(typed).run()


@record
class _StepIndex:
    """An ordered loop around a statement: its index, as a size or as `first + number * step`."""

    var: LoopVar | None
    index: Size | None
    first: ArrayInfo | None = None
    number: Size | None = None
    turn: LoopTurn | None = None


class _TreeLowering:
    def __init__(self, typed: TypedKernel) -> None:
        self.typed = typed
        self.arrays: dict[str, ArrayInfo] = {
            a.name: a for a in (*typed.inputs, *typed.outputs, *typed.scratch) if isinstance(a, ArrayInfo)
        }
        self.values: dict[Variable, Expr] = {}
        """Top-level variables, each as an expression over arguments and arrays."""
        self.drafts: list[Draft] = []
        self.steps: list[_StepIndex] = []
        """The ordered loops around the statement at hand."""
        self.loops: list[OrderedLoop] = []
        self.places: dict[Draft, tuple[LoopTurn, ...]] = {}
        """The loops each kernel is in."""
        self.cells: dict[Variable, ArrayInfo] = {}
        """Where variables are that live from step to step."""
        self.open: Draft | None = None
        """The last kernel, while code over the same domain may still join it."""
        self.shape: tuple[Size, ...] = ()
        self.results = {a.name for a in (*typed.outputs, *typed.inputs) if isinstance(a, ArrayInfo) and a.role != "input"}
        """Arrays that the caller sees."""

    def run(self) -> Program:
        for stmt in self.typed.body:
            self.statement(stmt)
        return self.program()

    # -- statements -------------------------------------------------------------------------------------------------

    def statement(self, stmt: Stmt) -> None:
        if isinstance(stmt, SetVar):
            self.set_variable(stmt.var, self.resolved(stmt.value), stmt)
        elif isinstance(stmt, Accumulate):
            args = (self.values[stmt.var], self.resolved(stmt.value))
            self.set_variable(stmt.var, Apply(stmt.kind, args, stmt.var.dtype, span=stmt.span), stmt)
        elif isinstance(stmt, TypedLoop | TypedWhile) and stmt.kind == "ordered":
            self.ordered(stmt)
        elif isinstance(stmt, ArrayAssign):
            self.array_assign(stmt)
        elif isinstance(stmt, ReduceLoop):
            draft = self.start(stmt, tuple(v.count for v in stmt.outer if v.count is not None), stmt.outer)
            draft.reduce_loop(stmt)
        elif isinstance(stmt, TypedLoop) and stmt.kind == "parallel" and None not in (counts := self.counts(stmt.vars)):
            draft = self.draft(stmt)
            draft.open_loops(stmt.vars, counts)
            draft.statements(draft.body, stmt.body, draft.scope)
        else:
            self.serial(stmt)

    def counts(self, variables: tuple[LoopVar, ...]) -> list[Size | None]:
        """How many values each index takes: a size, where it can be one."""
        fixed = {step.var: step.index for step in self.steps if step.var is not None and step.index is not None}
        reached = [range_under(var, fixed) for var in variables]
        return [None if r is None else r[1] for r in reached]

    # -- ordered loops ----------------------------------------------------------------------------------------------

    def ordered(self, stmt: TypedLoop | TypedWhile) -> None:
        """A loop whose steps run one after the other, each like statements of the top."""
        self.open, self.shape = None, ()
        carried = [var for var in assigned(stmt.body) if var not in self.cells]
        for var in carried:
            cell = self.scratch(f"{var.name}$carried", compute_dtype(var.dtype))
            self.array_assign(ArrayAssign(cell, self.values[var], span=stmt.span))
            self.cells[var] = cell
            self.set_value(var, Element(cell, (), span=stmt.span))
        loop, step = self.while_step(stmt) if isinstance(stmt, TypedWhile) else self.for_step(stmt)
        self.loops.append(loop)
        self.open, self.shape = None, ()
        turns = stmt.body[0].bodies if isinstance(stmt.body[0], TypedTurns) else (stmt.body,)
        for number, body in enumerate(turns):
            self.steps.append(replace(step, turn=LoopTurn(loop.name, len(turns), number)))
            for inner in body:
                self.statement(inner)
            if isinstance(stmt, TypedWhile):
                self.array_assign(ArrayAssign(self.arrays[loop.cell], self.resolved(stmt.cond), span=stmt.span))
            self.open, self.shape = None, ()
            self.steps.pop()
        for var in carried:
            # The array keeps the last value.
            del self.cells[var]

    def while_step(self, stmt: TypedWhile) -> tuple[OrderedLoop, _StepIndex]:
        cell = self.scratch("goes_on", bool_)
        self.array_assign(ArrayAssign(cell, self.resolved(stmt.cond), span=stmt.span))
        return OrderedLoop(self.step_name("step"), None, cell.name, stmt.span), _StepIndex(None, None)

    def for_step(self, stmt: TypedLoop) -> tuple[OrderedLoop, _StepIndex]:
        (var,) = stmt.vars
        name = self.step_name(var.name)
        fixed = {step.var: step.index for step in self.steps if step.var is not None and step.index is not None}
        reached = range_under(var, fixed)
        if reached is not None:
            first, count = reached
            return OrderedLoop(name, count, "", stmt.span), _StepIndex(var, first + var.step * Size.of(name))
        draft = self.start(stmt, (), ())
        draft.body.span = stmt.span
        number, begin = self.scratch(f"{var.name}$count", i64), self.scratch(f"{var.name}$first", i64)
        draft.store(draft.body, number, (), draft.extent(draft.body, var, draft.scope))
        draft.store(draft.body, begin, (), draft.expr(draft.body, var.lo, draft.scope))
        return OrderedLoop(name, None, number.name, stmt.span), _StepIndex(var, None, begin, Size.of(name))

    def step_name(self, name: str) -> str:
        taken = {n for s in (*self.typed.inputs, *self.typed.outputs, *self.typed.scratch) if isinstance(s, ArrayInfo) for e in s.shape for n in e.names}
        taken |= {loop.name for loop in self.loops} | {s.name for s in self.typed.inputs}
        number = 0
        while (found := f"{name}.{number}") in taken:
            number += 1
        return found

    def set_variable(self, var: Variable, value: Expr, stmt: Stmt) -> None:
        """A variable has a new value: in an ordered loop one that memory may change is computed at once."""
        cell = self.cells.get(var)
        if cell is None and self.steps and any(isinstance(e, Element) and e.array.role != "input" for e in walk_expr(value)):
            cell = self.scratch(var.name, compute_dtype(var.dtype))
        if cell is not None:
            self.array_assign(ArrayAssign(cell, value, span=stmt.span))
            value = Element(cell, (), span=stmt.span)
        self.set_value(var, value)

    # -- values -----------------------------------------------------------------------------------------------------

    def set_value(self, var: Variable, value: Expr) -> None:
        self.values[var] = value
        if self.open is not None:
            self.open.scope.pop(var, None)

    def resolved(self, expr: Expr) -> Expr:
        """The expression with top-level variables replaced by what they are."""
        if isinstance(expr, Local):
            return self.values[expr.var]
        if isinstance(expr, Apply):
            return replace(expr, args=tuple(self.resolved(a) for a in expr.args))
        if isinstance(expr, Cast):
            return replace(expr, value=self.resolved(expr.value))
        if isinstance(expr, Choose):
            cond, then, otherwise = (self.resolved(e) for e in (expr.cond, expr.then, expr.otherwise))
            return replace(expr, cond=cond, then=then, otherwise=otherwise)
        if isinstance(expr, Picked):
            axes = tuple(
                replace(a, start=None if a.start is None else self.resolved(a.start), index=None if a.index is None else self.resolved(a.index)) for a in expr.axes
            )
            return replace(expr, value=self.resolved(expr.value), axes=axes)
        if isinstance(expr, Element):
            return self.settle(replace(expr, indices=tuple(self.resolved(i) for i in expr.indices)))
        return expr

    def settle(self, expr: Element) -> Expr:
        """An element of an array that may change later is read now, into a scratch of its own."""
        if expr.array.role == "input" or (not expr.indices and expr.array.role != "inout"):
            return expr
        scratch = self.scratch(f"{expr.array.name}$value", expr.dtype)
        self.array_assign(ArrayAssign(scratch, expr, span=expr.span))
        return Element(scratch, (), span=expr.span)

    def serial(self, stmt: Stmt) -> None:
        """Code that runs once: a kernel of rank 0. Variables it sets go to 0-d scratch arrays."""
        straight = not any(isinstance(s, TypedLoop) for s in walk_stmts((stmt,)))
        if not (straight and self.open is not None and not self.shape):
            self.start(stmt, (), ())
        draft = self.open
        assert draft is not None
        targets = assigned((stmt,))
        draft.statements(draft.body, (stmt,), draft.scope)
        for var in targets:
            value = draft.scope.pop(var)
            scratch = self.cells.get(var) or self.scratch(var.name, compute_dtype(var.dtype))
            draft.body.span = stmt.span
            draft.store(draft.body, scratch, (), value)
            self.values[var] = Element(scratch, (), span=stmt.span)

    def array_assign(self, stmt: ArrayAssign) -> None:
        array = stmt.array
        shape = array.shape
        has_reduce = isinstance(stmt.value, Reduce)
        if self.open is None or has_reduce or self.shape != shape or not self.can_join(self.open, stmt):
            self.start(stmt, shape, None)
        draft = self.open
        assert draft is not None
        draft.body.span = stmt.span
        if isinstance(stmt.value, Reduce):
            value = draft.reduce_value(stmt.value, draft.indices)
        else:
            value = draft.of(draft.body, draft.unrounded(stmt.value, array), draft.scope, draft.indices)
        draft.store(draft.body, array, draft.indices, value)

    def can_join(self, draft: Draft, stmt: ArrayAssign) -> bool:
        """Whether what it reads of the open kernel's results is only the element at hand."""
        if stmt.array.name in draft.written or stmt.array.name in draft.read:
            return False
        for expr in walk_expr(stmt.value):
            if isinstance(expr, Element) and expr.array.name in draft.written and (expr.indices or self.shape):
                return False
            if isinstance(expr, Whole) and expr.array.name in draft.written and expr.shape != self.shape:
                return False
            if isinstance(expr, Picked) and any(isinstance(e, Whole) and e.array.name in draft.written for e in walk_expr(expr)):
                return False
        return True

    # -- kernels ----------------------------------------------------------------------------------------------------

    def draft(self, stmt: Stmt) -> Draft:
        """A new kernel; no other joins the one before it."""
        self.open, self.shape = None, ()
        draft = Draft(self.arrays, {s.name: s for s in self.typed.inputs if isinstance(s, ScalarInfo)}, self.values, stmt.span)
        self.drafts.append(draft)
        self.places[draft] = tuple(step.turn for step in self.steps if step.turn is not None)
        for step in self.steps:
            if step.var is not None:
                draft.scope[step.var] = self.index_of(draft, step)
        return draft

    def index_of(self, draft: Draft, step: _StepIndex) -> Value:
        """The index of an ordered loop around a kernel."""
        if step.index is not None:
            return draft.size(step.index)
        assert step.var is not None and step.first is not None and step.number is not None
        first = draft.expr(draft.body, Element(step.first, ()), draft.scope)
        return draft.body.add(first, draft.body.mul(draft.size(step.number), draft.size(step.var.step)))

    def start(self, stmt: Stmt, shape: tuple[Size, ...], variables: tuple[LoopVar, ...] | None) -> Draft:
        """A new kernel over a domain of known sizes, open for more."""
        draft = self.draft(stmt)
        if variables is None:
            draft.open_shape(shape)
        else:
            draft.open_loops(variables)
        self.open, self.shape = draft, shape
        return draft

    def scratch(self, name: str, dtype: DType) -> ArrayInfo:
        unique, number = name, 0
        taken = {s.name for s in self.typed.inputs} | set(self.arrays)
        while unique in taken:
            number += 1
            unique = f"{name}${number}"
        array = row_major(unique, dtype, (), "scratch")
        self.arrays[unique] = array
        return array

    # -- the whole --------------------------------------------------------------------------------------------------

    def program(self) -> Program:
        typed = self.typed
        order = [s.name for s in typed.inputs] + [n for n in self.arrays if n not in {s.name for s in typed.inputs}]
        needed = self.read_arrays() | self.results
        calls: list[KernelCall] = []
        for draft in self.drafts:
            kernel = eliminate_dead(draft.kernel(f"{typed.name}_{len(calls)}" if len(self.drafts) > 1 else typed.name, needed))
            used = {v for op in walk(kernel.body) for v in op.operands}
            params = sorted((p for p in kernel.params if p in used), key=lambda p: order.index(p.name))
            if _writes(kernel):
                calls.append(KernelCall(replace(kernel, params=tuple(params)), tuple(p.name for p in params), self.places[draft]))
        marked = {turn.loop for call in calls for turn in call.loops}
        loops = tuple(loop for loop in self.loops if loop.name in marked)
        present = {name for call in calls for name in call.args} | {loop.cell for loop in loops}
        inputs = tuple(
            ProgramArray(p.name, tensor_type(p), p.role) if isinstance(p, ArrayInfo)
            else ProgramArray(p.name, scalar_type(p), "input") if p.dtype.is_complex else ScalarInput(p.name, p.dtype)
            for p in typed.inputs
        )
        outputs = tuple(ProgramArray(a.name, tensor_type(a), "output") for a in typed.outputs)
        scratch = tuple(
            ProgramArray(a.name, tensor_type(a), "scratch") for a in self.arrays.values() if a.role == "scratch" and a.name in present
        )
        checks = tuple(ProgramCheck(c.left, c.relation, c.right, c.message, c.span, c.code) for c in typed.checks)
        return _bound(Program(typed.name, inputs, outputs, scratch, tuple(calls), checks, typed.span, computed=typed.computed, loops=loops))

    def read_arrays(self) -> set[str]:
        """Arrays some kernel loads from; stores to other scratch arrays are dropped."""
        names: set[str] = set()
        while True:
            found: set[str] = set()
            for draft in self.drafts:
                kernel = eliminate_dead(draft.kernel("", names or None))
                found |= {op.operands[0].name for op in walk(kernel.body) if op.opcode == "load"}
            found |= self.results | {loop.cell for loop in self.loops}
            if found == names:
                return found
            names = found


def _writes(kernel: Kernel) -> bool:
    return any(op.opcode in ("store", "accumulate", "print", "assert") for op in walk(kernel.body))


def _bound(program: Program) -> Program:
    """The program with sizes that calls bind: in an ordered loop an extent may be made of a number that was passed and of the loop's index. No size is negative,
    so such a number is the difference of two: `n = max(0, n) - max(0, -n)`."""
    sizes = [*(name for call in program.calls for name in call.kernel.size_names), *(n for loop in program.loops if loop.count is not None for n in loop.count.names)]
    numbers = sorted({name for name in sizes if is_number(name)})
    if not numbers:
        return program
    computed = dict(program.computed)
    known: dict[str, Size] = {}
    for name in numbers:
        title = parameter_of(name)
        above, below = (maximum(ZERO, Size.of(name) * sign) for sign in (1, -1))
        plus = next((n for n, value in computed.items() if value == above), computed_name(f"{title}$above"))
        minus = computed_name(f"{title}$below")
        computed |= {plus: above, minus: below}
        known[name] = Size.of(plus) - Size.of(minus)
    changed = substituted(replace(program, checks=(), computed=()), known)
    return replace(program, calls=changed.calls, loops=changed.loops, computed=tuple(computed.items()))
