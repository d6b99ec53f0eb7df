"""The checker: an untyped kernel and what it is called with in, a typed kernel out.

`check_kernel` walks the kernel until nothing new is learnt: a variable's dtype comes from all its assignments, an output's
extent from all its stores, and sizes are made equal by accesses anywhere. Only what the last walk reports counts, and all
its errors come together. After the walks the loops are classified (`loops.py`).

Two flavours. A Python kernel (`kind` "kernel") makes its outputs and returns them; names live as in Python. A ZynML compute
block ("compute") writes `out[…]` or yields; names are scoped by blocks, and a name nothing declares is a size.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base import dtypes
from tilewright.base.errors import CompilerBug, Diagnostic, Diagnostics
from tilewright.tree import syntax
from tilewright.tree.check.aliases import AliasedWrites
from tilewright.tree.check.attribute_claims import check_attributes, shared_demand
from tilewright.tree.check.body import BodyChecker
from tilewright.tree.check.solve import Equations, Solution, solve
from tilewright.tree.check.state import State, WalkAgain, assigned_names
from tilewright.tree.check.tuples import split_assignments
from tilewright.tree.inline import declared, nodes
from tilewright.tree.kind_claims import check_claim
from tilewright.tree.kind_sizes import bind_by_kind, check_parameters, kind_checks
from tilewright.tree.metadata import KernelKind, KernelMetadata, read_attributes, suggest
from tilewright.tree.order.classify import classify
from tilewright.tree.order.whole_parts import scratch_in
from tilewright.tree.typed import ArgSpec, ArrayArg, ArrayInfo, Shape, SizeCheck, TypedKernel
from tilewright.tree.unwritten import fill_unwritten

_MOST_WALKS = 24
_RECENT = 32
_recent: dict[tuple[int, tuple[ArgSpec, ...]], tuple[syntax.Function, TypedKernel, tuple[Diagnostic, ...]]] = {}
"""The latest kernels that were right, by identity and types: several questions about one follow each other."""


def check_kernel(function: syntax.Function, args: Sequence[ArgSpec], sink: Diagnostics | None = None) -> TypedKernel:
    """Check a kernel for arguments of these types. Raises UserError with all errors, which also go to `sink`."""
    sink = sink if sink is not None else Diagnostics()
    asked, key = function, (id(function), tuple(args))
    known = _recent.get(key)
    if known is not None and known[0] is function:
        sink.items.extend(known[2])
        return known[1]
    diagnostics = Diagnostics()
    function = split_assignments(function)
    aliased = AliasedWrites(set(declared(function.body)) - set(declared(asked.body)))
    aliased.block(function.body)
    metadata = read_attributes(function.attributes, diagnostics)
    if function.attributes and function.kind == "kernel":
        check_claim(metadata.kind, function.attributes, function.body, diagnostics)
        check_attributes(function, diagnostics)
    if function.kind == "compute":
        check_claim(metadata.kind, function.attributes, function.body, diagnostics)
        check_attributes(function, diagnostics)
        check_parameters(function, metadata, diagnostics)
    _check_count(function, args, diagnostics)
    axes = _axis_names(function, args)
    state = State(Equations(axes), assigned=assigned_names(function))
    walk = None
    shared: list[SizeCheck] = []
    said = len(diagnostics.errors)
    if not said or _can_go_on(function, args, diagnostics):
        while walk is None:
            try:
                walk = _walk_until_settled(function, args, metadata, state, aliased.found)
            except WalkAgain:
                state = State(Equations(axes), assigned=state.assigned, longer=state.longer)
        diagnostics.items.extend(walk.context.sink.items)
        if len(diagnostics.errors) == said:
            # A statement given up for another error may be the one that binds a size.
            _report_sizes(walk, diagnostics)
            shared = _shared(function, walk, diagnostics)
    kernel = None
    if walk is not None and not diagnostics.errors:
        written = walk.body if walk.context.is_python else fill_unwritten(walk.body, walk.results)
        body = classify(written, metadata.kind is KernelKind.ELEMENTWISE or metadata.vectorizable, diagnostics, _all_checks(walk))
        computed = walk.sizes.numbers.finish()
        # Loops in order may have made others of some.
        scratch = {a.name: a for a in walk.arrays.by_name.values() if a.role == "scratch"} | scratch_in(body)
        kernel = TypedKernel(
            function.name or "compute", tuple(walk.arrays.params), tuple(walk.results),
            tuple(scratch.values()), body, (*_all_checks(walk), *shared, *kind_checks(function, args, metadata, walk.context.state)), metadata, computed, _repeats(axes, state), span=function.span,
        )  # fmt: skip
        _check_result(function, kernel, diagnostics)
    sink.items.extend(diagnostics.items)
    diagnostics.raise_if_errors()
    assert kernel is not None
    while len(_recent) >= _RECENT:
        _recent.pop(next(iter(_recent), key), None)
    _recent[key] = asked, kernel, tuple(diagnostics.items)
    return kernel


def _repeats(axes: Sequence[str], state: State) -> tuple[tuple[str, int], ...]:
    """The axes of inputs that meet others in array expressions."""
    return tuple((name.rpartition("$")[0], int(name.rpartition("$")[2])) for name in axes if name in state.met)


def _check_result(function: syntax.Function, kernel: TypedKernel, sink: Diagnostics) -> None:
    """Results are what the annotation of a Python kernel says, as far as it says anything."""
    node = function.result
    if node is None or function.kind != "kernel":
        return
    parts: tuple[syntax.Expr, ...] = (node,)
    if isinstance(node, syntax.Index) and isinstance(node.value, syntax.Name) and node.value.id in ("tuple", "Tuple"):
        parts = node.indices
        if len(parts) != len(kernel.outputs):
            sink.error("TW016", f"{function.name} is annotated to return {len(parts)} results, and returns {len(kernel.outputs)}", node.span)
            return
    if len(parts) != len(kernel.outputs):
        return  # one word for all of them, such as `object`
    for part, output in zip(parts, kernel.outputs, strict=True):
        base = part.value if isinstance(part, syntax.Index) else part
        if isinstance(part, syntax.Index) and isinstance(base, syntax.Name) and dtypes.is_name(base.id) and len(part.indices) != len(output.shape):
            sink.error("TW003", f"'{output.name}' is annotated with rank {len(part.indices)}, and has rank {len(output.shape)}", part.span)
        if isinstance(part, syntax.Name) and part.id in ("int", "float", "complex", "bool") and output.shape:
            sink.error("TW003", f"'{output.name}' is annotated as a number, and is an array of rank {len(output.shape)}", part.span, "annotate it as tw.Array")
        elif isinstance(base, syntax.Name) and dtypes.is_name(base.id) and base.id not in ("int", "float", "bool") and dtypes.by_name(base.id) is not output.dtype:
            sink.error("TW009", f"'{output.name}' is annotated as {base.id}, and is {output.dtype}", part.span, f"make it with dtype {base.id}, or annotate it as {output.dtype}")


def _can_go_on(function: syntax.Function, args: Sequence[ArgSpec], sink: Diagnostics) -> bool:
    """Whether the body can be checked although attributes are wrong: what it means depends on its kind alone, if that is of the right form."""
    kinds = {node.span for a in function.attributes if a.name == "kernel" for node in nodes(a)}
    return len(function.params) == len(args) and not any(d.span in kinds and d.code != "TW012" for d in sink.errors)


def _walk_until_settled(
    function: syntax.Function, args: Sequence[ArgSpec], metadata: KernelMetadata, state: State, aliased: dict[int, set[str]]
) -> BodyChecker:
    reserved = frozenset(p.name for p in function.params)
    for _ in range(_MOST_WALKS):
        state.changed = False
        known = state.equations.count()
        walk = BodyChecker(function, args, metadata, state, Diagnostics(), aliased)
        walk.run()
        if stale := state.returned - {array.name for array in walk.results}:
            # What an earlier walk took for a result: it did not know yet which loops are unrolled, and names change places there.
            state.returned -= stale
            state.changed = True
        _bind_by_range(walk)
        bind_by_kind(function, args, metadata, state)
        walk.arrays.learn_outputs()
        solution = solve(state.equations, reserved)
        if solution == state.solution and known == state.equations.count() and not state.changed:
            return walk
        for output in state.outputs.values():
            if output.shape is not None:
                output.shape = _renamed(state, solution, output.shape)
        for variable in state.variables.values():
            variable.shape = _renamed(state, solution, variable.shape)
        for loop, shape in state.tiled.items():
            state.tiled[loop] = _renamed(state, solution, shape)
        state.solution = solution
    raise CompilerBug.at("TW040", f"the types of '{function.name}' do not settle", function.span)


def _renamed(state: State, solution: Solution, shape: Shape) -> Shape:
    """A shape that an earlier walk found, in the names of the new solution."""
    return tuple(state.solution.raw(s).substitute(solution.sizes) for s in shape)


def _axis_names(function: syntax.Function, args: Sequence[ArgSpec]) -> tuple[str, ...]:
    names: list[str] = []
    for param, arg in zip(function.params, args, strict=False):
        if isinstance(arg, ArrayArg):
            names += [f"{param.name}${axis}" for axis in range(arg.rank)]
    return tuple(names)


def _check_count(function: syntax.Function, args: Sequence[ArgSpec], sink: Diagnostics) -> None:
    if len(function.params) != len(args):
        names = ", ".join(p.name for p in function.params)
        sink.error("TW016", f"{function.name}({names}) takes {len(function.params)} arguments, got {len(args)}", function.span)


def _bind_by_range(walk: BodyChecker) -> None:
    """ZynML: an input axis that is only reached by indices over one range (`0..3*hidden`) has that extent."""
    if walk.context.is_python:
        return
    state = walk.context.state
    for axis, ranges in walk.sizes.ranges.items():
        if len(ranges) == 1:
            (extent, span) = next(iter(ranges.items()))
            raw = state.solution.raw(extent) if extent is not None else None
            if raw is not None and raw.name is None and axis not in raw.names:
                state.equations.defined.setdefault((axis, raw), span)


def _report_sizes(walk: BodyChecker, sink: Diagnostics) -> None:
    """Names that no input gives a value, and extents that would have to be two constants."""
    equations, solution = walk.context.state.equations, walk.context.state.solution
    for name in sorted(solution.unbound, key=lambda n: list(equations.used).index(n)):
        span = equations.used[name]
        bound = [n for n in equations.used if n not in solution.unbound]
        if name in equations.ranges:
            known = f"known sizes: {', '.join(bound)}" if bound else "no size is known"
            sink.error(
                "TW014", f"size '{name}' is not bound by any input; {known}", span,
                suggest(name, bound) or f"index an axis of an input with an index over 0..{name}",
            )  # fmt: skip
        else:
            params = [p.name for p in walk.arrays.params]
            sink.error("TW002", f"unknown name '{name}'", span, suggest(name, params + bound) or f"known names: {', '.join(params + bound)}")
    for conflict in solution.conflicts:
        sink.error("TW004", f"'{conflict.name}' would have to be both {conflict.first} and {conflict.second}", conflict.span)


def _shared(function: syntax.Function, walk: BodyChecker, sink: Diagnostics) -> list[SizeCheck]:
    arrays = [item for item in walk.arrays.params if isinstance(item, ArrayInfo)]
    bound = {name for array in arrays for size in array.shape for name in size.names}
    return shared_demand(function.attributes, walk.context.state.solution.sizes, bound, sink)


def _all_checks(walk: BodyChecker) -> tuple[SizeCheck, ...]:
    checks = list(walk.sizes.checks.values())
    for left, right, span in walk.context.state.solution.leftover:
        known = walk.context.state.solution.sizes
        a, b = left.substitute(known), right.substitute(known)
        if a != b:
            checks.append(SizeCheck(a, "eq", b, "extents {left} and {right} do not match", span=span))
    return tuple(checks)
