"""The verifier: a kernel or a program in, nothing out; `CompilerBug` TW042 when the IR breaks a rule of its stage.

It runs after every pass, so it is one linear walk. It knows: single definition and dominance; which ops are legal at the
stage; result types by the op table (a tile's layout may differ: it is assigned later); the shape of regions; tensors are
only touched by memory ops; the form of a kernel at each stage:

    loop     no grid; at top level pure ops and exactly one `parallel`; scalars only
    tile     a grid of 1 to 3 sizes; scalars and tiles, shared memory and tokens
    thread   a grid of 1 to 3 sizes; scalars and vecs, any memory space and tokens
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.dtypes import DType, i64, u8, u16, u32
from tilewright.base.errors import CODES, CompilerBug, TilewrightError
from tilewright.base.sizes import Size, number_name
from tilewright.base.source import NOWHERE, Span
from tilewright.ir.nodes import Block, Kernel, Op, Stage, Value, walk
from tilewright.ir.ops import ATOMICS, OPS, OpDef, TypeRuleError, reduction_results
from tilewright.ir.program import KernelCall, Program, ProgramArray, ScalarInput, call_tree
from tilewright.ir.types import BOOL, INDEX, CopyMap, Scalar, Tensor, Tile, Type, Vec, dtype_of

STAGE_TYPES: dict[Stage, frozenset[type]] = {
    Stage.LOOP: frozenset({Scalar}),
    Stage.TILE: frozenset({Scalar, Tile, Tensor}),
    Stage.THREAD: frozenset({Scalar, Vec, Tensor, CopyMap}),
}
"""What an op may result in, or a region take, at each stage."""
SCOPES = ("thread", "block", "cluster", "device", "system")
RELATIONS = ("eq", "le", "lt")


def verify_kernel(kernel: Kernel) -> None:
    """Raise `CompilerBug` when the kernel breaks a rule of its stage."""
    _Verifier(kernel).run()


def verify_program(program: Program, known: frozenset[Kernel] = frozenset()) -> None:
    """Verify every kernel but the `known` ones, and that calls fit the arrays, names are unique and every size is bound."""

    def fail(reason: str, span: Span = NOWHERE) -> TilewrightError:
        return CompilerBug.at("TW042", f"program @{program.name}: {reason}", span if span.line else program.span)

    arrays: dict[str, ProgramArray | ScalarInput] = {}
    for roles, group in ((("input", "inout"), program.inputs), (("output",), program.outputs), (("scratch",), program.scratch)):
        for array in group:
            if array.name in arrays:
                raise fail(f"two arrays are called {array.name!r}")
            if isinstance(array, ProgramArray) and array.role not in roles:
                raise fail(f"{roles[0]} {array.name!r} is marked as {array.role}")
            arrays[array.name] = array
    bound = {binding.name for binding in program.bindings()} | set(program.launch_sizes)
    numbers = {number_name(s.name) for s in program.inputs if isinstance(s, ScalarInput) and s.dtype.is_int}
    for name, value in program.computed:
        if name in bound or not value.names <= bound | numbers:
            raise fail(f"the computed size {name!r} = {value} is bound elsewhere, or made of names that nothing binds")
    bound |= {name for name, _ in program.computed}
    for array in arrays.values():
        if isinstance(array, ProgramArray):
            for size in (*array.type.shape, *array.type.strides):
                if not size.names <= bound:
                    raise fail(f"no input binds {_listed(size.names - bound)}, used by {array.role} {array.name!r}")
    for check in program.checks:
        if check.relation not in RELATIONS:
            raise fail(f"unknown relation {check.relation!r} in a check", check.span)
        if check.code not in CODES:
            raise fail(f"unknown code {check.code!r} in a check", check.span)
        if not check.left.names | check.right.names <= bound | numbers:
            raise fail(
                f"no input binds {_listed((check.left.names | check.right.names) - bound)}, used by a check", check.span
            )
    verified = set(known)
    problem = _loop_problem(program, arrays, bound)
    if problem:
        raise fail(problem)
    for call in program.calls:
        reason = _call_problem(call, arrays)
        if not reason and call.kernel not in verified:
            verify_kernel(call.kernel)
            verified.add(call.kernel)
            free = set(call.kernel.size_names) - bound - {turn.loop for turn in call.loops}
            reason = f"no input binds {_listed(free)}" if free else ""
        if reason:
            raise fail(f"call of @{call.kernel.name}: {reason}", call.kernel.span)


def _loop_problem(program: Program, arrays: dict[str, ProgramArray | ScalarInput], bound: set[str]) -> str:
    """What is wrong with the ordered loops of a program; empty when nothing is."""
    loops = {loop.name: loop for loop in program.loops}
    if len(loops) != len(program.loops) or loops.keys() & bound:
        return "two ordered loops, or one and a size, have the same name"
    around: dict[str, tuple[str, ...]] = {}
    for call in program.calls:
        for depth, turn in enumerate(call.loops):
            if turn.loop not in loops:
                return f"no ordered loop is called {turn.loop!r}"
            if not 0 <= turn.turn < turn.period:
                return f"turn {turn.turn} of {turn.period} in the ordered loop {turn.loop!r}"
            outer = tuple(t.loop for t in call.loops[:depth])
            if around.setdefault(turn.loop, outer) != outer:
                return f"the ordered loop {turn.loop!r} is in several others"
    for loop in program.loops:
        if loop.count is not None:
            free = loop.count.names - bound - set(around.get(loop.name, ()))
            if free:
                return f"no input binds {_listed(free)}, used by the ordered loop {loop.name!r}"
            continue
        cell = arrays.get(loop.cell)
        if not isinstance(cell, ProgramArray) or cell.type.rank or not (cell.type.dtype is i64 or cell.type.dtype.is_bool):
            return f"the ordered loop {loop.name!r} needs an array of i64 or bool without axes, got {loop.cell!r}"
    try:
        call_tree(program)
    except ValueError as error:
        return str(error)
    return ""


def _listed(names: set[str] | frozenset[str]) -> str:
    return ", ".join(sorted(names))


def _call_problem(call: KernelCall, arrays: dict[str, ProgramArray | ScalarInput]) -> str:
    """What is wrong with the arguments of a call; empty when nothing is."""
    params = call.kernel.params
    if len(call.args) != len(params):
        return f"takes {len(params)} arguments, got {len(call.args)}"
    for name, param in zip(call.args, params, strict=True):
        array = arrays.get(name)
        if array is None:
            return f"no array or scalar is called {name!r}"
        # A pass may view an array in another shape, so only the element type must agree.
        if isinstance(array, ProgramArray) != isinstance(param.type, Tensor):
            return f"{name!r} is {'an array' if isinstance(array, ProgramArray) else 'a scalar'}, parameter {param}"
        given = array.type.dtype if isinstance(array, ProgramArray) else array.dtype
        own = dtype_of(param.type)
        if given is not own and not (given is u8 and own in (u16, u32)):  # bytes may be read as words
            return f"{name!r} holds {given}, parameter {param}"
    return ""


def same_type(a: Type, b: Type) -> bool:
    """Whether types agree, whatever the layouts of tiles are."""
    if a is b or a == b:
        return True
    return isinstance(a, Tile) and isinstance(b, Tile) and a.dtype is b.dtype and a.shape == b.shape


def _passes_as(a: Type, b: Type) -> bool:
    """Whether a value of type `a` may become one of type `b` without an op: layouts agree where both are assigned."""
    if a is b or a == b:
        return True
    if not (isinstance(a, Tile) and isinstance(b, Tile) and (a.layout is None or b.layout is None)):
        return False
    return a.dtype is b.dtype and a.shape == b.shape


class _Verifier:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.stage = kernel.stage.value
        self.types = STAGE_TYPES[kernel.stage]
        self.defined: set[Value] = set()
        self.visible: set[Value] = set()

    def fail(self, reason: str, op: Op | None = None) -> TilewrightError:
        text = f"kernel @{self.kernel.name}: {reason}"
        span = self.kernel.span
        if op is not None:
            from tilewright.ir.text import print_op  # most kernels are right

            text += f", in `{print_op(op, self.kernel)}`"
            if op.span.line:
                span = op.span
        return CompilerBug.at("TW042", text, span)

    def run(self) -> None:
        kernel = self.kernel
        for param in kernel.params:
            if not isinstance(param.type, Scalar | Tensor):
                raise self.fail(f"parameter {param} is neither a scalar nor a tensor")
            if isinstance(param.type, Tensor):
                if len(param.type.shape) != len(param.type.strides):
                    raise self.fail(
                        f"parameter {param} has {len(param.type.shape)} extents and {len(param.type.strides)} strides"
                    )
                if param.type.space not in ("global", "constant"):
                    raise self.fail(f"parameter {param} is in {param.type.space} memory")
            if param in self.defined:
                raise self.fail(f"parameter {param} is listed twice")
            self.defined.add(param)
        self.visible |= self.defined
        for name, divisor in kernel.facts.items():
            if divisor < 1:
                raise self.fail(f"fact {name}: {divisor} is no divisor")
        self.check_launch()
        if kernel.body.args:
            raise self.fail("the body takes no arguments")
        self.block(kernel.body, None, False)
        self.check_accumulated()

    def check_accumulated(self) -> None:
        """What is combined into, in any order, is combined in one way only, and not read or written otherwise."""
        kinds: dict[Value, Op] = {}
        for op in walk(self.kernel.body):
            if op.opcode == "accumulate":
                first = kinds.setdefault(op.operands[0], op)
                if first.attrs["kind"] != op.attrs["kind"]:
                    raise self.fail(f"{op.operands[0]} is combined by {first.attrs['kind']} too", op)
        for op in walk(self.kernel.body) if kinds else ():
            if op.opcode in ("load", "store", "atomic") and op.operands[0] in kinds and op.operands[0] in self.kernel.params and not kinds[op.operands[0]].attrs.get("alone"):
                raise self.fail(f"{op.operands[0]} is combined into in any order, so nothing else may access it", op)

    def check_launch(self) -> None:
        kernel = self.kernel
        if kernel.threads < 1:
            raise self.fail(f"needs at least one thread, got {kernel.threads}")
        if kernel.stage is not Stage.LOOP:
            if not 1 <= len(kernel.grid) <= 3:
                raise self.fail(f"a kernel at the {self.stage} stage has 1 to 3 grid sizes, got {len(kernel.grid)}")
            return
        if kernel.grid:
            raise self.fail("a kernel at the loop stage has no grid")
        parallels = 0
        for op in kernel.body.ops:
            definition = OPS.get(op.opcode)
            if op.opcode == "parallel":
                parallels += 1
            elif definition is not None and not definition.is_pure and op.opcode != "yield":
                raise self.fail("only `parallel` and pure ops stand at the top level of the loop stage", op)
        if parallels != 1:
            raise self.fail(f"the loop stage has exactly one `parallel` at top level, got {parallels}")

    def block(self, block: Block, owner: Op | None, inside_reduce: bool) -> None:
        """Verify the ops of a region of `owner` (None: the kernel's body) and forget its values after."""
        visible, defined = self.visible, self.defined
        mine: list[Value] = []
        for arg in block.args:
            self.define(arg, owner, mine)
        last = len(block.ops) - 1
        stage = self.stage
        for position, op in enumerate(block.ops):
            definition = OPS.get(op.opcode)
            if definition is None:
                raise self.fail(f"unknown op {op.opcode!r}", op)
            if stage not in definition.stages:
                raise self.fail(f"{op.opcode} is not legal at the {stage} stage", op)
            for operand in op.operands:
                if operand not in visible:
                    known = (
                        "is used outside its region or before its definition"
                        if operand in defined
                        else "is not defined here"
                    )
                    raise self.fail(f"{operand} {known}", op)
            if len(op.regions) != definition.regions:
                raise self.fail(f"{op.opcode} has {definition.regions} regions, got {len(op.regions)}", op)
            if inside_reduce and definition.effect in ("write", "sync"):
                raise self.fail(f"{op.opcode} inside a reduction, which must be pure", op)
            if op.opcode == "yield":
                if owner is None or position != last:
                    raise self.fail("yield must be the last op of a region", op)
                for operand in op.operands:
                    if isinstance(operand.type, Tensor):
                        raise self.fail("a tensor is only used by memory ops", op)
            if definition.rule is None:
                self.structured(op, owner, inside_reduce)
            else:
                self.leaf(op, definition)
            for result in op.results:
                self.define(result, op, mine)
        if owner is not None and (last < 0 or block.ops[last].opcode != "yield"):
            raise self.fail(f"a region of {owner.opcode} does not end in yield", owner)
        visible.difference_update(mine)

    def define(self, value: Value, op: Op | None, mine: list[Value]) -> None:
        if value in self.defined:
            raise self.fail(f"{value} is defined twice", op)
        if type(value.type) not in self.types:
            raise self.fail(f"a value of type {value.type} is not legal at the {self.stage} stage", op)
        self.defined.add(value)
        self.visible.add(value)
        mine.append(value)

    # -- ops without regions ------------------------------------------------------------------------------------

    def leaf(self, op: Op, definition: OpDef) -> None:
        assert definition.rule is not None
        try:
            expected = definition.rule([operand.type for operand in op.operands], op.attrs)
        except TypeRuleError as error:
            described = ", ".join(str(operand.type) for operand in op.operands)
            raise self.fail(f"{op.opcode}({described}): {error}", op) from error
        if len(expected) != len(op.results):
            raise self.fail(f"{op.opcode} has {len(expected)} results, got {len(op.results)}", op)
        for wanted, result in zip(expected, op.results, strict=True):
            if not same_type(wanted, result.type):
                raise self.fail(f"result {result} should have type {wanted}", op)
        check = _LEAF_CHECKS.get(op.opcode)
        if check is not None:
            reason = check(op, self.kernel)
            if reason:
                raise self.fail(reason, op)

    # -- ops with regions ---------------------------------------------------------------------------------------

    def structured(self, op: Op, owner: Op | None, inside_reduce: bool) -> None:
        for operand in op.operands:
            if isinstance(operand.type, Tensor):
                raise self.fail("a tensor is only used by memory ops", op)
        opcode = op.opcode
        for region in op.regions:
            self.block(region, op, inside_reduce or opcode == "reduce")
        operands = [operand.type for operand in op.operands]
        results = [result.type for result in op.results]
        args = [[arg.type for arg in region.args] for region in op.regions]
        yields = [[value.type for value in region.yields] for region in op.regions]
        if opcode in ("parallel", "reduce"):
            self.expect(op, "extents", operands, [INDEX] * len(operands))
            self.expect(op, "indices", args[0], [INDEX] * len(operands))
            self.expect(op, "results", results, yields[0])
            if opcode == "parallel":
                self.expect(op, "yielded values", yields[0], [])
                if owner is not None:
                    raise self.fail("`parallel` only stands at the top level", op)
            else:
                self.reduction(op, yields[0])
        elif opcode == "for":
            if len(operands) < 3 or not isinstance(operands[0], Scalar) or not operands[0].dtype.is_int:
                raise self.fail("for takes an integer range: from, to, step", op)
            self.expect(op, "range", operands[:3], [operands[0]] * 3)
            self.expect(op, "region arguments", args[0], [operands[0], *operands[3:]])
            self.expect(op, "yielded values", yields[0], operands[3:])
            self.expect(op, "results", results, operands[3:])
        elif opcode == "run_blocks":
            self.expect(op, "number of blocks and work", operands, [INDEX, INDEX])
            self.expect(op, "region arguments", args[0], [INDEX])
            self.expect(op, "yielded values", yields[0], [])
            if owner is not None and owner.opcode == "run_blocks":
                raise self.fail("run_blocks inside another one", op)
        elif opcode == "if":
            self.expect(op, "condition", operands, [BOOL])
            for number in (0, 1):
                self.expect(op, "region arguments", args[number], [])
                self.expect(op, "yielded values", yields[number], results)
        elif opcode == "while":
            self.expect(op, "arguments of the condition", args[0], operands)
            self.expect(op, "values of the condition", yields[0], [BOOL, *operands])
            self.expect(op, "region arguments", args[1], operands)
            self.expect(op, "yielded values", yields[1], operands)
            self.expect(op, "results", results, operands)

    def reduction(self, op: Op, yields: Sequence[Type]) -> None:
        if not op.operands:
            raise self.fail("reduce takes at least one extent", op)
        kind = op.attrs.get("kind")
        try:
            reduction_results(str(kind), yields)
        except TypeRuleError as error:
            raise self.fail(str(error), op) from error
        if kind in ("and", "or") and dtype_of(yields[0]).is_float:
            raise self.fail(f"reduction {kind} does not take {yields[0]}", op)

    def expect(self, op: Op, what: str, found: Sequence[Type], wanted: Sequence[Type]) -> None:
        if len(found) != len(wanted) or not all(map(_passes_as, found, wanted)):
            got = ", ".join(map(str, found)) or "none"
            raise self.fail(
                f"{what} of {op.opcode} should be ({', '.join(map(str, wanted)) or 'none'}), got ({got})", op
            )


# -- what the type rules leave open ---------------------------------------------------------------------------------


def _check_const(op: Op, kernel: Kernel) -> str:
    value, dtype = op.attrs.get("value"), op.attrs.get("dtype")
    assert isinstance(dtype, DType)
    kind = bool if dtype.is_bool else float if dtype.is_float else int
    if type(value) is not kind:
        return f"a constant of {dtype} has a {kind.__name__} value, got {value!r}"
    if dtype.is_int and not dtype.min_value <= value <= dtype.max_value:
        return f"{value} does not fit {dtype}"
    return ""


def _check_size(op: Op, kernel: Kernel) -> str:
    if op.operands:
        return "size takes no operands"
    return "" if isinstance(op.attrs.get("value"), Size) else "size needs a symbolic size as attribute value"


def _check_program_id(op: Op, kernel: Kernel) -> str:
    axis = op.attrs.get("axis")
    if op.operands:
        return f"{op.opcode} takes no operands"
    if type(axis) is not int or not 0 <= axis < len(kernel.grid):
        return f"{op.opcode} needs an axis of the grid, which has {len(kernel.grid)}, got {axis!r}"
    return ""


def _check_thread_id(op: Op, kernel: Kernel) -> str:
    return "thread_id takes no operands" if op.operands else ""


def _check_scope(op: Op, kernel: Kernel) -> str:
    scope = op.attrs.get("scope", "device")
    return "" if scope in SCOPES else f"unknown scope {scope!r}"


def _check_atomic(op: Op, kernel: Kernel) -> str:
    kind = op.attrs.get("kind")
    return _check_scope(op, kernel) if kind in ATOMICS else f"unknown atomic {kind!r}"


_LEAF_CHECKS = {
    "const": _check_const,
    "size": _check_size,
    "program_id": _check_program_id,
    "grid_size": _check_program_id,
    "thread_id": _check_thread_id,
    "fence": _check_scope,
    "atomic": _check_atomic,
}
