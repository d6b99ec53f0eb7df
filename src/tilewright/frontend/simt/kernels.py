"""The front end of explicit kernels: a Python function under `@tw.gpu` in, a thread-stage kernel out.

`read_parameters` looks at the annotations. `build_kernel` reads the body for arguments of certain types and a certain launch (block
shape, axes of the grid, dynamic shared memory): these are part of the code. The grid itself is free: its sizes are names the launch
gives. Element accesses are loads and stores on tensors with their extents, so every later stage knows what is out of bounds.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType

from tilewright.base.dtypes import DType, f32, f64
from tilewright.base.errors import CompilerBug, UserError, in_order
from tilewright.base.sizes import Size, contiguous_strides
from tilewright.base.source import Span
from tilewright.frontend.simt.build import COUNT, GRID, LaunchShape
from tilewright.frontend.simt.expressions import record_fields
from tilewright.frontend.simt.flow import RETURN
from tilewright.frontend.simt.numbers import as_dtype
from tilewright.frontend.simt.source import FunctionSource
from tilewright.frontend.simt.state import Types
from tilewright.frontend.simt.statements import Statements
from tilewright.frontend.simt.values import (
    Host,
    MemoryValue,
    NumberValue,
    RecordValue,
    Val,
    WordValue,
    describe,
    literal,
)
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Attr, Block, Kernel, Op, Stage, Value, walk
from tilewright.ir.ops import OPS
from tilewright.ir.program import KernelCall, Program, ProgramArray, ScalarInput
from tilewright.ir.types import Scalar, Tensor
from tilewright.tree.check.infer import TypePair
from tilewright.tree.typed import ArrayArg, ScalarArg

_MOST_ROUNDS = 24
"""Times a kernel is read until the dtypes of its variables have settled."""


@dataclass(frozen=True)
class Parameter:
    """A parameter as it is written. `form` is buffer, array, number, struct, or empty where there is no annotation."""

    name: str
    form: str
    dtype: DType | None
    kind: type | None
    default: object
    """The default, or `NO_DEFAULT`."""
    span: Span
    fields: tuple[Parameter, ...] = ()
    """Of a struct."""


@dataclass(frozen=True)
class StructArg:
    """What a struct is: its fields in order, each a number or an array."""

    kind: type
    fields: tuple[tuple[str, SimtArg], ...]


SimtArg = ArrayArg | ScalarArg | StructArg
NO_DEFAULT = object()


@dataclass(frozen=True)
class BuiltKernel:
    """A kernel for arguments of certain types, and what a launch has to know of it."""

    program: Program
    kernel: Kernel
    written: frozenset[str]
    """Names of the arrays it writes."""
    cooperative: bool
    """Whether threads of a block work together: through shared memory, barriers or warps."""
    variables: Mapping[str, TypePair]
    """The types of its own variables that are numbers."""


def read_parameters(source: FunctionSource) -> tuple[Parameter, ...]:
    """The parameters of a kernel with their annotations. Raises `UserError`."""
    reader = Statements(LaunchShape((1, 1, 1)), f32, source, Types())
    node = source.node
    if isinstance(node, ast.Lambda):
        raise UserError.at("TW005", "a lambda is no kernel", source.head(), "write it as a function with 'def'")
    arguments = node.args
    for extra, star in ((arguments.vararg, "*"), (arguments.kwarg, "**")):
        if extra is not None:
            raise reader.unsupported(extra, f"'{star}{extra.arg}'", "name every parameter")
    if node.returns is not None and not (isinstance(node.returns, ast.Constant) and node.returns.value is None):
        raise reader.unsupported(node.returns, "a result", "write it into an array the kernel is given: '-> None'")
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    defaults += [*arguments.defaults, *arguments.kw_defaults]
    found = []
    for argument, default in zip([*positional, *arguments.kwonlyargs], defaults, strict=True):
        span = source.span(argument)
        form, dtype, kind = (
            ("", None, None) if argument.annotation is None else _annotation(reader, argument.annotation, argument.arg)
        )
        value = NO_DEFAULT if default is None else _default(reader, default, argument.arg)
        fields = _struct_fields(reader, kind, argument) if kind is not None else ()
        found.append(Parameter(argument.arg, form, dtype, kind, value, span, fields))
    return tuple(found)


def _annotation(reader: Statements, node: ast.expr, name: str) -> tuple[str, DType | None, type | None]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        node = ast.copy_location(ast.parse(node.value, mode="eval").body, node)
        for part in ast.walk(node):
            ast.copy_location(part, node)
    if isinstance(node, ast.Subscript):
        owner = reader.read(node.value)
        if isinstance(owner, WordValue) and owner.name == "GpuBuffer":
            element = reader.read(node.slice)
            if isinstance(element, WordValue) and element.name in ("float", "int", "bool"):
                return "buffer", None, None
            return "buffer", reader.dtype(element, f"the elements of '{name}'"), None
        found: Val = owner
    else:
        found = reader.read(node)
    return _meaning(reader, found, node, name)


def _meaning(reader: Statements, found: Val, node: ast.expr, name: str) -> tuple[str, DType | None, type | None]:
    if isinstance(found, WordValue):
        if found.name == "GpuBuffer":
            return "buffer", None, None
        if found.name in ("float", "int", "bool"):
            return "number", None, None
    dtype = as_dtype(found)
    if dtype is not None:
        return "number", dtype, None
    if isinstance(found, Host) and isinstance(found.object, type):
        if found.object.__name__ == "Array" and found.object.__module__.startswith("tilewright."):
            return "array", None, None
        if record_fields(found.object):
            return "struct", None, found.object
    with reader.b.at(reader.span(node)):
        raise reader.fail(
            f"'{name}' is annotated as {describe(found)}",
            "use a dtype such as tw.f32, tw.GpuBuffer[tw.f32], tw.Array, or a dataclass of these",
            "TW009",
        )


def _struct_fields(reader: Statements, kind: type, argument: ast.arg) -> tuple[Parameter, ...]:
    from typing import get_type_hints

    span = reader.scope.source.span(argument)
    try:
        hints = get_type_hints(kind)
    except (NameError, TypeError) as error:
        raise UserError.at("TW009", f"the fields of {kind.__name__} cannot be read: {error}", span) from None
    fields = []
    for name in record_fields(kind):
        hint = hints.get(name)
        if getattr(hint, "__simt__", None) == "GpuBuffer":
            element = getattr(hint, "dtype", None)
            fields.append(Parameter(name, "buffer", element if isinstance(element, DType) else None, None, NO_DEFAULT, span))
            continue
        found = reader.captured(hint, name) if hint is not None else Host(None)
        form, dtype, inner = _meaning(reader, found, argument.annotation or ast.Constant(None), f"{argument.arg}.{name}")
        if inner is not None:
            raise UserError.at(
                "TW005", f"'{argument.arg}.{name}' is a struct inside a struct", span, "write its fields one by one"
            )
        fields.append(Parameter(name, form, dtype, None, NO_DEFAULT, span))
    return tuple(fields)


def _default(reader: Statements, node: ast.expr, name: str) -> object:
    val = reader.read(node)
    if isinstance(val, NumberValue) and val.const is not None:
        return val.const
    with reader.b.at(reader.span(node)):
        raise reader.fail(f"the default of '{name}' is {describe(val)}, not a number", code="TW009")


def build_kernel(
    source: FunctionSource, parameters: Sequence[Parameter], args: Sequence[SimtArg], launch: LaunchShape, attrs: dict[str, Attr] | None = None,
    alike: Mapping[str, str] = MappingProxyType({}),
) -> BuiltKernel:  # fmt: skip
    """The kernel for these arguments: read again and again until the types of all variables are known.

    `alike` names arrays that have the shape of another, whose sizes then stand for theirs."""
    default_float = f64 if any(a.dtype is f64 and not _is_weak(a) for a in _plain(args)) else f32
    types = Types()
    for _ in range(_MOST_ROUNDS):
        types.changed = False
        known = len(types.pairs), len(types.flags)
        reader = Statements(launch, default_float, source, types)
        try:
            params = _read_body(reader, source, parameters, args, alike)
        except UserError as error:
            # It may come from types that are not known yet.
            if not types.changed and known == (len(types.pairs), len(types.flags)):
                raise _every_error(error, Statements(launch, default_float, source, types), source, parameters, args, alike) from None
            continue
        if not types.changed:
            return _finished(reader, source, params, attrs or {})
    raise CompilerBug.at("TW040", f"the types of the variables of '{source.name}' do not settle", source.head())


def _every_error(
    error: UserError, reader: Statements, source: FunctionSource, parameters: Sequence[Parameter], args: Sequence[SimtArg],
    alike: Mapping[str, str],
) -> UserError:  # fmt: skip
    """The error with those of all other statements. What a wrong statement leaves behind may be anything: reading ends where it cannot go on."""
    reader.collected = {}
    with suppress(Exception):
        _read_body(reader, source, parameters, args, alike)
    return UserError(*in_order(dict.fromkeys((*error.diagnostics, *reader.collected))))


def _read_body(
    reader: Statements, source: FunctionSource, parameters: Sequence[Parameter], args: Sequence[SimtArg], alike: Mapping[str, str]
) -> list[Value]:
    """One round; gives the IR's parameters."""
    params = _declare(reader, parameters, args, alike)
    if (*reader.scope.key, RETURN) in reader.types.flags:
        reader.scope.variables[RETURN] = literal(False)
    assert isinstance(source.node, ast.FunctionDef)
    reader.block(source.node.body)
    return params


def _plain(args: Sequence[SimtArg]) -> list[ArrayArg | ScalarArg]:
    found: list[ArrayArg | ScalarArg] = []
    for arg in args:
        found += _plain([inner for _, inner in arg.fields]) if isinstance(arg, StructArg) else [arg]
    return found


def _is_weak(arg: ArrayArg | ScalarArg) -> bool:
    return isinstance(arg, ScalarArg) and arg.weak


def _declare(
    reader: Statements, parameters: Sequence[Parameter], args: Sequence[SimtArg], alike: Mapping[str, str]
) -> list[Value]:
    """Make the IR's parameters, and variables of the kernel that hold them."""
    made: list[Value] = []

    def one(name: str, arg: SimtArg) -> Val:
        if isinstance(arg, StructArg):
            return RecordValue(arg.kind, tuple(n for n, _ in arg.fields), tuple(one(f"{name}.{n}", inner) for n, inner in arg.fields))
        if isinstance(arg, ArrayArg):
            made.append(Value(array_type(alike.get(name, name), arg), name))
            return MemoryValue(name, made[-1])
        dtype = reader.default_float if arg.weak and arg.dtype.is_float else arg.dtype
        made.append(Value(Scalar(dtype), name))
        return NumberValue(dtype, ("float" if dtype.is_float else "index") if arg.weak else "", made[-1])

    for parameter, arg in zip(parameters, args, strict=True):
        val = one(parameter.name, arg)
        with reader.b.at(parameter.span):
            reader.assign(parameter.name, val)
    return made


def array_type(name: str, arg: ArrayArg) -> Tensor:
    """The tensor of an array argument: extents are names, and so are strides unless they follow from them."""
    shape = tuple(Size.of(f"{name}${axis}") for axis in range(arg.rank))
    if arg.strides is None:
        return Tensor(arg.dtype, shape, contiguous_strides(shape), "global", arg.align)
    strides = tuple(Size.of(s if s is not None else f"{name}$stride{axis}") for axis, s in enumerate(arg.strides))
    return Tensor(arg.dtype, shape, strides, "global", arg.align)


def written_tensors(body: Block) -> set[Value]:
    """The tensors that ops write, by themselves or through the copy engine."""
    ops = list(walk(body))
    maps = {op.result: op.operands[0] for op in ops if op.opcode == "tensor_map"}
    found = {op.operands[0] for op in ops if OPS[op.opcode].effect == "write" and op.operands}
    found |= {op.operands[2] for op in ops if op.opcode == "bulk_store"}
    return found | {maps[op.operands[2]] for op in ops if op.opcode == "tma_store"}


def _finished(reader: Statements, source: FunctionSource, params: list[Value], attrs: dict[str, Attr]) -> BuiltKernel:
    launch = reader.launch
    body = reader.b.ops
    ops = [*reader.prologue.ops, *body]
    working = Block((), tuple(ops))
    cooperative = any(OPS[op.opcode].effect == "sync" or _is_shared(op) for op in walk(working))
    if launch.guarded:
        guarded = _guarded(reader, ops, cooperative, len(reader.prologue.ops))
        working = Block((), tuple(guarded))
    grid = tuple(Size.of(name) for name in GRID[: launch.rank])
    kernel = Kernel(
        source.name, Stage.THREAD, tuple(params), working, grid, launch.threads,
        attrs=MappingProxyType({"block": launch.block, **({"noalias": False} if cooperative else {}), **attrs}), span=source.head(),
    )  # fmt: skip
    written = frozenset(tensor.name for tensor in written_tensors(working) if tensor in params)
    inputs = tuple(
        ProgramArray(p.name, p.type, "input") if isinstance(p.type, Tensor) else ScalarInput(p.name, p.type.dtype) for p in params
    )
    call = KernelCall(kernel, tuple(p.name for p in params))
    program = Program(source.name, inputs, (), (), (call,), span=source.head(), launch_sizes=(*GRID, COUNT))
    outermost = reader.scope.key
    variables = {key[-1]: pair for key, pair in reader.types.pairs.items() if key[:-1] == outermost and isinstance(key[-1], str)}
    return BuiltKernel(program, kernel, written, cooperative, MappingProxyType(variables))


def _is_shared(op: Op) -> bool:
    return op.opcode == "alloc" and op.attrs.get("space") == "shared"


def _guarded(reader: Statements, ops: list[Op], cooperative: bool, prologue: int) -> list[Op]:
    """Threads beyond the launch's count do nothing."""
    identity = reader.global_id()
    ops = [*reader.prologue.ops, *ops[prologue:]]
    start = len(reader.prologue.ops)
    test = Builder(reader.scope.source.head())
    inside = test.op("lt", identity, test.index(Size.of(COUNT)))
    if cooperative:
        from tilewright.frontend.simt.tail import guard_accesses

        return guard_accesses(ops[:start] + test.ops, ops[start:], inside)
    empty = Builder()
    empty.multi("yield")
    body = Builder(reader.scope.source.head())
    body.ops = ops[start:]
    body.multi("yield")
    guard = Op(
        "if",
        (inside,),
        (),
        MappingProxyType({}),
        (Block((), tuple(body.ops)), Block((), tuple(empty.ops))),
        reader.scope.source.head(),
    )
    return [*ops[:start], *test.ops, guard]
