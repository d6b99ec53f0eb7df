"""What a kernel's attributes say about it: kind, device, schedule hints, execution constraints.

In come the `@name(args)` attributes of a kernel; out comes one `KernelMetadata`. An attribute nobody knows, or one of the
wrong form, is reported with its place. Schedule attributes are hints: they are kept here for the scheduler to read.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import field
from enum import Enum
from math import prod

from tilewright.base.errors import Diagnostics
from tilewright.base.record import record
from tilewright.base.target import NVPTX
from tilewright.tree import syntax


class KernelKind(Enum):
    """What the kernel computes, as its author sees it."""

    ELEMENTWISE = "elementwise"
    REDUCE = "reduce"
    SCAN = "scan"
    SORT = "sort"
    FILTER = "filter"
    HISTOGRAM = "histogram"
    MATMUL = "matmul"
    BATCHED_MATMUL = "batched_matmul"
    CONV2D = "conv2d"
    CONV2D_DEPTHWISE = "conv2d_depthwise"
    ATTENTION = "attention"
    FLASH_ATTENTION = "flash_attention"
    FUSED = "fused"
    CUSTOM = "custom"


CONTRACTIONS = (KernelKind.MATMUL, KernelKind.BATCHED_MATMUL, KernelKind.CONV2D)
"""Kinds that promise sums of products."""


class CompileTarget(Enum):
    """Which kinds of device code is made for."""

    CPU = "cpu"
    GPU = "gpu"
    HETEROGENEOUS = "heterogeneous"
    cpu, gpu, heterogeneous = CPU, GPU, HETEROGENEOUS


@record
class DeviceTarget:
    """Where the author wants it to run: `auto`, `cpu`, `cuda:0`…; several for a kernel split over devices."""

    names: tuple[str, ...] = ("auto",)

    def __str__(self) -> str:
        return ", ".join(self.names)

    @property
    def compile_target(self) -> CompileTarget:
        kinds = {name.partition(":")[0] for name in self.names}
        if kinds <= {"cpu"}:
            return CompileTarget.CPU
        return CompileTarget.HETEROGENEOUS if kinds & {"cpu", "auto"} else CompileTarget.GPU


@record
class KernelHints:
    """What the author thinks makes it fast."""

    use_tensor_cores: bool = False
    vector_width: int | None = None
    unroll_factor: int | None = None
    coalesced_access: bool = False
    async_copy: bool = False
    tile: tuple[tuple[str, int], ...] = ()
    """`@tile(block_q=64)`: names (or axis numbers) and extents."""


@record
class ExecutionConstraints:
    """What latency-critical CPU code must not do, and what it aims for."""

    no_allocation: bool = False
    no_syscalls: bool = False
    inline_always: bool = False
    unsafe_unchecked: bool = False
    cpu_affinity: int | None = None
    target_latency_ns: int | None = None
    critical_path: bool = False


@record
class KernelMetadata:
    kind: KernelKind = KernelKind.CUSTOM
    label: str = ""
    """The kind as written, where it is a name of the author's own."""
    reduction: str = ""
    """`@kernel reduce(op)`: the reduction of the IR."""
    axes: tuple[int, ...] | None = None
    """`@kernel reduce(op, axis=k)`: the loops that reduce; None means all."""
    params: tuple[tuple[str, int], ...] = ()
    """`@kernel conv2d(stride=2)`: named integers of the kind."""
    device: DeviceTarget = field(default_factory=DeviceTarget)
    workgroup_size: tuple[int, int, int] | None = None
    shared_memory_bytes: int = 0
    max_registers: int = 0
    is_device_function: bool = False
    is_async: bool = False
    parallel: str = ""
    """How it is split over several devices: `data` or `model`."""
    strict: bool = False
    """Schedule attributes bind: what they ask for is used, or refused."""
    precision: str = ""
    """`@precision(tf32)`: how contractions of f32 are multiplied."""
    broadcast: tuple[tuple[str, int], ...] = ()
    """`@broadcast(vector, axis=1)`: an input and the axis of the output it runs along."""
    hints: KernelHints = field(default_factory=KernelHints)
    constraints: ExecutionConstraints = field(default_factory=ExecutionConstraints)
    kernels: tuple[tuple[str, KernelMetadata], ...] = ()
    """Of several blocks that are one program: what each says about its kernels, by their names."""

    def of(self, kernel: str) -> KernelMetadata:
        """What is said about one kernel."""
        return next((own for name, own in self.kernels if name == kernel), self)

    @property
    def compile_target(self) -> CompileTarget:
        return CompileTarget.CPU if self.constraints.critical_path else self.device.compile_target

    def lines(self) -> list[str]:
        """The attributes that were given, as text."""
        name = self.label or self.kind.value
        parts = [self.reduction] if self.reduction else []
        parts += [f"axis={list(self.axes)}"] if self.axes is not None else []
        parts += [f"{key}={value}" for key, value in self.params]
        found = [f"@kernel {name}({', '.join(parts)})" if parts else f"@kernel {name}"]
        if self.device != DeviceTarget():
            found.append(f"@device({self.device})")
        if self.workgroup_size:
            found.append(f"@workgroup{self.workgroup_size}")
        if self.shared_memory_bytes:
            found.append(f"@shared({self.shared_memory_bytes})")
        if self.hints.tile:
            found.append(f"@tile({', '.join(f'{k}={v}' for k, v in self.hints.tile)})")
        found += ["@strict"] if self.strict else []
        found += [f"@precision({self.precision})"] if self.precision else []
        if self.constraints.critical_path:
            found.append("@critical_path")
        return found


MOST_SHARED = max(target.max_shared for target in NVPTX.values())
"""Bytes of shared memory of one block, where it has most."""
MOST_THREADS = max(target.max_threads for target in NVPTX.values())
PRECISIONS = ("ieee", "tf32", "3xtf32")
"""How contractions of f32 may be multiplied: as f32, or on matrix units with 10 bits, or with three products of 10 bits each."""
REDUCTION_NAMES = {
    "+": "add", "*": "mul", "add": "add", "sum": "add", "mul": "mul", "prod": "mul", "min": "min", "max": "max",
    "and": "and", "or": "or", "all": "and", "any": "or", "argmin": "argmin", "argmax": "argmax",
}  # fmt: skip


def suggest(name: str, known: Sequence[str]) -> str:
    """`did you mean 'x'?`, or nothing when no name is close."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean '{close[0]}'?" if close else ""


class _Bad(Exception):
    """An attribute of the wrong form; the message has been reported."""


class _Reader:
    """Collects the fields of the metadata from attributes."""

    def __init__(self, sink: Diagnostics) -> None:
        self.sink = sink
        self.fields: dict[str, object] = {}
        self.hints: dict[str, object] = {}
        self.constraints: dict[str, object] = {}
        self.kind = KernelKind.CUSTOM

    def bad(self, node: syntax.Node, message: str, help: str = "") -> _Bad:
        self.sink.error("TW016", message, node.span, help)
        return _Bad()

    def integer(self, expr: syntax.Expr, what: str) -> int:
        value = constant(expr)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.bad(expr, f"{what} must be a constant integer")
        return value

    def integers(self, expr: syntax.Expr, what: str) -> tuple[int, ...]:
        if isinstance(expr, syntax.Tuple | syntax.List):
            return tuple(self.integer(item, what) for item in expr.items)
        return (self.integer(expr, what),)

    def one(self, attribute: syntax.KernelAttribute) -> syntax.Expr:
        if len(attribute.args) != 1:
            raise self.bad(attribute, f"@{attribute.name} takes one argument, got {len(attribute.args)}")
        return attribute.args[0].value

    # -- one method per attribute -----------------------------------------------------------------------------------

    def kernel(self, attribute: syntax.KernelAttribute) -> None:
        if not attribute.args:
            raise self.bad(attribute, "@kernel needs a kind", "write for example @kernel elementwise")
        kind = attribute.args[0].value
        # `@kernel reduce(+, axis=1)` has its parameters in a call; further arguments of the attribute itself are parameters too.
        params = (kind.args if isinstance(kind, syntax.Call) else ()) + attribute.args[1:]
        name = kind.function if isinstance(kind, syntax.Call) else kind
        if not isinstance(name, syntax.Name | syntax.String):
            raise self.bad(kind, "the kernel kind must be a name")
        label = name.id if isinstance(name, syntax.Name) else name.value
        try:
            self.kind = KernelKind(label)
        except ValueError:
            # Any name is a kind of the author's own, unless it is nearly one of ours.
            close = difflib.get_close_matches(label, [k.value for k in KernelKind], n=1, cutoff=0.85)
            if close:
                self.sink.error("TW011", f"unknown kernel kind '{label}'", name.span, f"did you mean '{close[0]}'?")
                raise _Bad from None
            self.fields["label"] = label
        self.fields["kind"] = self.kind
        if self.kind is KernelKind.REDUCE:
            self.reduction(attribute, params)
        else:
            named = [(p.keyword, self.integer(p.value, f"'{p.keyword}'")) for p in params if p.keyword]
            self.fields["params"] = tuple(named)

    def reduction(self, attribute: syntax.KernelAttribute, params: Sequence[syntax.Argument]) -> None:
        operations = [p for p in params if p.keyword is None]
        if len(operations) != 1:
            raise self.bad(
                attribute, f"@kernel reduce takes one operation, got {len(operations)}", "write for example @kernel reduce(+)"
            )
        value = operations[0].value
        text = value.id if isinstance(value, syntax.Name) else value.value if isinstance(value, syntax.String) else "?"
        if text not in REDUCTION_NAMES:
            known = ", ".join(REDUCTION_NAMES)
            raise self.bad(value, f"unknown reduction '{text}'", suggest(text, list(REDUCTION_NAMES)) or f"choose one of {known}")
        self.fields["reduction"] = REDUCTION_NAMES[text]
        for param in params:
            if param.keyword == "axis":
                self.fields["axes"] = self.integers(param.value, "axis")
            elif param.keyword:
                raise self.bad(param, f"@kernel reduce has no parameter '{param.keyword}'", "its only one is axis")

    def device(self, attribute: syntax.KernelAttribute) -> None:
        value = self.one(attribute)
        items = value.items if isinstance(value, syntax.List | syntax.Tuple) else (value,)
        names: list[str] = []
        for item in items:
            if not isinstance(item, syntax.String | syntax.Name):
                raise self.bad(item, '@device takes device names such as "cpu" or "cuda:0"')
            names.append(item.value if isinstance(item, syntax.String) else item.id)
        self.fields["device"] = DeviceTarget(tuple(names))

    def workgroup(self, attribute: syntax.KernelAttribute) -> None:
        sizes = [n for a in attribute.args for n in self.integers(a.value, "@workgroup")]
        if not 1 <= len(sizes) <= 3 or min(sizes) < 1:
            raise self.bad(attribute, f"@workgroup takes one to three positive integers, got {sizes}")
        if prod(sizes) > MOST_THREADS:
            self.sink.error(
                "TW020", f"@workgroup asks for {prod(sizes)} threads, and a block has at most {MOST_THREADS}", attribute.span, "ask for fewer"
            )
            raise _Bad
        x, y, z = (*sizes, 1, 1)[:3]
        self.fields["workgroup_size"] = (x, y, z)

    def shared(self, attribute: syntax.KernelAttribute) -> None:
        value = constant(self.one(attribute))
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            raise self.bad(attribute, "@shared takes a number of bytes, or an expression of sizes", "write for example @shared(16 * 16 * 4)")
        if isinstance(value, int) and value > MOST_SHARED:
            self.sink.error(
                "TW020", f"@shared asks for {value} bytes, and a block has at most {MOST_SHARED} on any target", attribute.span, "ask for less"
            )
            raise _Bad
        # A demand in terms of sizes (`batch * seq * 4`) is known, and checked, only at a call; as a hint it says nothing before that.
        self.fields["shared_memory_bytes"] = value if isinstance(value, int) else 0

    def tile(self, attribute: syntax.KernelAttribute) -> None:
        self.hints["tile"] = tuple(
            (a.keyword or str(position), self.integer(a.value, "@tile")) for position, a in enumerate(attribute.args)
        )

    def broadcast(self, attribute: syntax.KernelAttribute) -> None:
        names = [a.value.id for a in attribute.args if isinstance(a.value, syntax.Name) and a.keyword is None]
        axes = [self.integer(a.value, "axis") for a in attribute.args if a.keyword == "axis"]
        if len(names) != 1 or len(axes) > 1 or len(attribute.args) != 1 + len(axes):
            raise self.bad(attribute, "@broadcast takes an input and its axis", "write @broadcast(vector, axis=1)")
        found = self.fields.get("broadcast", ())
        assert isinstance(found, tuple)
        self.fields["broadcast"] = (*found, (names[0], axes[0] if axes else -1))

    def parallel(self, attribute: syntax.KernelAttribute) -> None:
        value = self.one(attribute)
        mode = value.id if isinstance(value, syntax.Name) else value.value if isinstance(value, syntax.String) else ""
        if mode not in ("data", "model"):
            raise self.bad(attribute, "@parallel takes data or model")
        self.fields["parallel"] = mode

    def precision(self, attribute: syntax.KernelAttribute) -> None:
        value = self.one(attribute)
        name = value.id if isinstance(value, syntax.Name) else value.value if isinstance(value, syntax.String) else ""
        if name not in PRECISIONS:
            raise self.bad(attribute, f"@precision takes one of {', '.join(PRECISIONS)}", 'write @precision(tf32), or @precision("3xtf32")')
        self.fields["precision"] = name

    def flag(self, group: str, *names: str) -> Callable[[syntax.KernelAttribute], None]:
        def read(attribute: syntax.KernelAttribute) -> None:
            if attribute.args:
                raise self.bad(attribute, f"@{attribute.name} takes no arguments")
            for name in names:
                {"fields": self.fields, "hints": self.hints, "constraints": self.constraints}[group][name] = True

        return read

    def number(self, group: str, name: str) -> Callable[[syntax.KernelAttribute], None]:
        def read(attribute: syntax.KernelAttribute) -> None:
            value = self.integer(self.one(attribute), f"@{attribute.name}")
            {"fields": self.fields, "hints": self.hints, "constraints": self.constraints}[group][name] = value

        return read

    def critical_path(self, attribute: syntax.KernelAttribute) -> None:
        self.constraints |= {"critical_path": True, "no_allocation": True, "no_syscalls": True}
        for argument in attribute.args:
            if argument.keyword != "target_latency_ns":
                raise self.bad(attribute, "@critical_path takes at most target_latency_ns=…")
            self.constraints["target_latency_ns"] = self.integer(argument.value, "target_latency_ns")

    def table(self) -> dict[str, Callable[[syntax.KernelAttribute], None]]:
        return {
            "kernel": self.kernel,
            "device": self.device,
            "workgroup": self.workgroup,
            "shared": self.shared,
            "tile": self.tile,
            "broadcast": self.broadcast,
            "parallel": self.parallel,
            "strict": self.flag("fields", "strict"),
            "precision": self.precision,
            "async": self.flag("fields", "is_async"),
            "device_function": self.flag("fields", "is_device_function"),
            "gpu_compute": self.flag("fields"),
            "max_registers": self.number("fields", "max_registers"),
            "tensor_cores": self.flag("hints", "use_tensor_cores"),
            "vectorizable": self.flag("hints", "coalesced_access"),
            "vector": self.number("hints", "vector_width"),
            "unroll": self.number("hints", "unroll_factor"),
            "async_copy": self.flag("hints", "async_copy"),
            "critical_path": self.critical_path,
            "no_allocation": self.flag("constraints", "no_allocation"),
            "no_syscalls": self.flag("constraints", "no_syscalls"),
            "inline_always": self.flag("constraints", "inline_always"),
            "unchecked": self.flag("constraints", "unsafe_unchecked"),
            "cpu_affinity": self.number("constraints", "cpu_affinity"),
        }


def constant(expr: syntax.Expr) -> int | float | bool | None:
    """The number an expression of literals means, or None."""
    if isinstance(expr, syntax.Number | syntax.Bool):
        return expr.value
    if isinstance(expr, syntax.Unary) and expr.op == "-":
        value = constant(expr.operand)
        return None if value is None else -value
    if isinstance(expr, syntax.Binary):
        left, right = constant(expr.left), constant(expr.right)
        if left is None or right is None:
            return None
        if expr.op in ("//", "zdiv") and right and isinstance(left, int) and isinstance(right, int):
            return left // right
        return {"+": left + right, "-": left - right, "*": left * right}.get(expr.op)
    return None


def read_attributes(attributes: Sequence[syntax.KernelAttribute], sink: Diagnostics) -> KernelMetadata:
    """The metadata these attributes describe; what is wrong goes to the sink."""
    reader = _Reader(sink)
    table = reader.table()
    for attribute in attributes:
        read = table.get(attribute.name)
        if read is None:
            known = ", ".join(f"@{name}" for name in table)
            help = suggest(attribute.name, list(table)) or f"known attributes: {known}"
            sink.error("TW011", f"unknown attribute '@{attribute.name}'", attribute.span, help)
            continue
        try:
            read(attribute)
        except _Bad:
            continue
    values = dict(reader.fields)
    values["hints"] = KernelHints(**reader.hints)  # type: ignore[arg-type]  # collected by name above
    values["constraints"] = ExecutionConstraints(**reader.constraints)  # type: ignore[arg-type]
    return KernelMetadata(**values)  # type: ignore[arg-type]


def attribute_names() -> tuple[str, ...]:
    """All attributes there are."""
    return tuple(_Reader(Diagnostics()).table())
