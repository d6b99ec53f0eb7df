"""What a kernel's attributes say about it: kind, device, schedule hints, execution constraints.

In come the `@name(args)` attributes of a kernel; out comes one `KernelMetadata`. Which words there are, and what they do, is declared in
`tree/kernel_words.py`. An attribute nobody knows, one of the wrong form, in the wrong place, or one that is refused, is reported with its
place. Schedule attributes are kept here for `passes/choose` to follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from enum import Enum
from math import prod

from tilewright.base import levels
from tilewright.base.errors import Diagnostics, close_matches
from tilewright.base.record import brief, record
from tilewright.base.target import NVPTX
from tilewright.tree import syntax
from tilewright.tree.kernel_words import ALIASES, ATTRIBUTE, BLOCK, FUNCTION, KIND, REFUSED, KindWord, Value


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

    __repr__ = brief


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

    __repr__ = brief


@record
class KernelMetadata:
    kind: KernelKind = KernelKind.CUSTOM
    label: str = ""
    """The kind as written, where it is a name of the author's own."""
    reduction: str = ""
    """`@kernel reduce(op)`: the reduction of the IR."""
    axes: tuple[int, ...] | None = None
    """`@kernel reduce(op, axis=k)`: the loops that reduce; None means all."""
    params: tuple[tuple[str, Value], ...] = ()
    """`@kernel conv2d(stride=2)`: named numbers of the kind."""
    device: DeviceTarget = field(default_factory=DeviceTarget)
    workgroup_size: tuple[int, int, int] | None = None
    shared_memory_bytes: int = 0
    max_registers: int = 0
    is_device_function: bool = False
    is_async: bool = False
    gpu_only: bool = False
    """`@gpu_compute`: it refuses to run on a CPU."""
    vectorizable: bool = False
    """`@vectorizable`: no loop carries a value, and nothing is shared."""
    parallel: str = ""
    """How it is split over several devices: `data` or `model`."""
    strict: bool = False
    """Schedule attributes bind: what they ask for is used, or refused."""
    deterministic: bool = False
    """`@deterministic`: the same bits on every run, whatever threads meet."""
    precision: str = ""
    """`@precision(tf32)`: how contractions of f32 are multiplied."""
    optimize: str = ""
    """`@optimize(O1)`: how much work goes into machine code; empty: as elsewhere."""
    activations: str = ""
    """`@activations(q8)`: numbers that packed weights are multiplied with are rounded to eight bits, block by block."""
    broadcast: tuple[tuple[str, int], ...] = ()
    """`@broadcast(vector, axis=1)`: an input and the axis of the output it runs along."""
    hints: KernelHints = field(default_factory=KernelHints)
    constraints: ExecutionConstraints = field(default_factory=ExecutionConstraints)
    kernels: tuple[tuple[str, KernelMetadata], ...] = ()
    """Of several blocks that are one program: what each says about its kernels, by their names."""

    __repr__ = brief

    @property
    def unchecked(self) -> bool:
        """`@unchecked`: indices that come from data are not checked."""
        return self.constraints.unsafe_unchecked

    def of(self, kernel: str) -> KernelMetadata:
        """What is said about one kernel."""
        return next((own for name, own in self.kernels if name == kernel), self)

    @property
    def compile_target(self) -> CompileTarget:
        return CompileTarget.CPU if self.constraints.critical_path else self.device.compile_target

    @property
    def asks(self) -> bool:
        """Whether attributes say more than what kind of kernel it is."""
        return len(self.lines()) > 1

    def lines(self) -> list[str]:
        """The attributes that were given, as text."""
        name = self.label or self.kind.value
        parts = [self.reduction] if self.reduction else []
        parts += [f"axis={list(self.axes)}"] if self.axes is not None else []
        parts += [f"{key}={str(value).lower()}" for key, value in self.params]
        found = [f"@kernel {name}({', '.join(parts)})" if parts else f"@kernel {name}"]
        if self.device != DeviceTarget():
            found.append(f"@device({self.device})")
        if self.workgroup_size:
            found.append(f"@workgroup{self.workgroup_size}")
        if self.shared_memory_bytes:
            found.append(f"@shared({self.shared_memory_bytes})")
        if self.hints.tile:
            found.append(f"@tile({', '.join(str(v) if k.isdigit() else f'{k}={v}' for k, v in self.hints.tile)})")
        hints = self.hints
        found += [f"@vector({hints.vector_width})"] if hints.vector_width is not None else []
        found += [f"@unroll({hints.unroll_factor})"] if hints.unroll_factor is not None else []
        found += [f"@max_registers({self.max_registers})"] if self.max_registers else []
        flags = {
            "tensor_cores": hints.use_tensor_cores, "async_copy": hints.async_copy, "strict": self.strict, "async": self.is_async,
            "gpu_compute": self.gpu_only, "vectorizable": self.vectorizable, "unchecked": self.unchecked,
            "deterministic": self.deterministic,
        }  # fmt: skip
        found += [f"@{name}" for name, given in flags.items() if given]
        found += [f"@precision({self.precision})"] if self.precision else []
        found += [f"@optimize({self.optimize})"] if self.optimize else []
        found += [f"@activations({self.activations})"] if self.activations else []
        return found


MOST_SHARED = max(target.max_shared for target in NVPTX.values())
"""Bytes of shared memory of one block, where it has most."""
MOST_THREADS = max(target.max_threads for target in NVPTX.values())
LEAST_REGISTERS, MOST_REGISTERS = 16, max(target.max_registers for target in NVPTX.values())
"""Registers of a thread that `@max_registers` may ask for."""
MOST_VECTOR, MOST_UNROLL = 64, 64
TILE_NAMES = ("m", "n", "k", "block_q", "block_kv")
PRECISIONS = ("auto", "ieee", "tf32", "3xtf32")
"""How contractions of f32 may be multiplied: as f32, or on matrix units with 10 bits, or with three products of 10 bits each."""
REDUCTION_NAMES = {
    "+": "add", "*": "mul", "add": "add", "sum": "add", "mul": "mul", "prod": "mul", "min": "min", "max": "max",
    "and": "and", "or": "or", "all": "and", "any": "or", "argmin": "argmin", "argmax": "argmax",
}  # fmt: skip


def suggest(name: str, known: Sequence[str]) -> str:
    """`did you mean 'x'?`, or nothing when no name is close: one letter in three may be wrong, missing, too many or in the other's place."""
    close = [other for other in close_matches(name, known, n=4) if slips(name, other) <= max(1, len(name) // 3)]
    return f"did you mean '{close[0]}'?" if close else ""


def slips(name: str, other: str) -> int:
    """How many letters are wrong, missing, too many, or exchanged with their neighbour."""
    name, other = name.lower(), other.lower()
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(name, 1):
        following = [i]
        for j, wanted in enumerate(other, 1):
            least = min(row[j] + 1, following[j - 1] + 1, row[j - 1] + (letter != wanted))
            if i > 1 and j > 1 and letter == other[j - 2] and wanted == name[i - 2]:
                least = min(least, before[j - 2] + 1)
            following.append(least)
        before, row = row, following
    return row[-1]


class _Bad(Exception):
    """An attribute of the wrong form; the message has been reported."""


class _MetadataReader:
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
        label = ALIASES.get(label, label)
        try:
            self.kind = KernelKind(label)
        except ValueError:
            # Any name is a kind of the author's own, unless it is nearly one of ours.
            close = close_matches(label, [k.value for k in KernelKind], n=1, cutoff=0.85)
            if close:
                self.sink.error("TW011", f"unknown kernel kind '{label}'", name.span, f"did you mean '{close[0]}'?")
                raise _Bad from None
            self.fields["label"] = label
        self.fields["kind"] = self.kind
        if self.kind is KernelKind.REDUCE:
            self.reduction(attribute, params)
            return
        if self.kind is KernelKind.SCAN:
            self.operation(attribute, "scan", params)
            params = tuple(p for p in params if p.keyword)
        self.fields["params"] = self.parameters(label, KIND.get(label), params)

    def parameters(self, label: str, word: KindWord | None, params: Sequence[syntax.Argument]) -> tuple[tuple[str, Value], ...]:
        """The parameters of a kind, each held against its declaration; those of the author's own kinds are numbers."""
        found: dict[str, Value] = {}
        wrong = False
        for param in params:
            name, declared = param.keyword, word.parameter(param.keyword or "") if word is not None else None
            known = [p.name for p in word.parameters] if word is not None else []
            listed = f"its parameters are {', '.join(known)}" if known else "it has none"
            if name is None:
                self.bad(param, f"@kernel {label} takes its parameters by name", f"write for example {known[0]}=…; {listed}" if known else listed)
            elif name in found:
                self.bad(param, f"@kernel {label} gets '{name}' twice", "keep one of them")
            elif word is not None and declared is None:
                self.bad(param, f"@kernel {label} has no parameter '{name}'", suggest(name, known) or listed)
            elif (value := constant(param.value)) is None:
                self.bad(param.value, f"'{name}' must be a constant number" if declared is None else f"'{name}' of @kernel {label} must be {declared.form}")
            elif declared is not None and declared.wrong(value):
                self.bad(param.value, f"'{name}' of @kernel {label} is {str(value).lower()}, and must be {declared.form}")
            else:
                found[name] = value
                continue
            wrong = True
        if wrong:
            raise _Bad
        return tuple(found.items())

    def operation(self, attribute: syntax.KernelAttribute, label: str, params: Sequence[syntax.Argument]) -> None:
        """`@kernel reduce(+)`: what values are combined by."""
        operations = [p for p in params if p.keyword is None]
        if len(operations) != 1:
            raise self.bad(
                attribute, f"@kernel {label} takes one operation, got {len(operations)}", f"write for example @kernel {label}(+)"
            )
        value = operations[0].value
        text = value.id if isinstance(value, syntax.Name) else value.value if isinstance(value, syntax.String) else "?"
        if text not in REDUCTION_NAMES:
            known = ", ".join(REDUCTION_NAMES)
            raise self.bad(value, f"unknown reduction '{text}'", suggest(text, list(REDUCTION_NAMES)) or f"choose one of {known}")
        self.fields["reduction"] = REDUCTION_NAMES[text]

    def reduction(self, attribute: syntax.KernelAttribute, params: Sequence[syntax.Argument]) -> None:
        self.operation(attribute, "reduce", params)
        for param in params:
            if param.keyword == "axis":
                self.fields["axes"] = self.integers(param.value, "axis")
            elif param.keyword:
                raise self.bad(
                    param, f"@kernel reduce has no parameter '{param.keyword}'", suggest(param.keyword, ["axis"]) or "its only one is axis"
                )

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
        found: dict[str, int] = {}
        for position, argument in enumerate(attribute.args):
            name, value = argument.keyword or str(position), self.integer(argument.value, "@tile")
            if argument.keyword is not None and name not in TILE_NAMES:
                raise self.bad(argument, f"@tile has no '{name}'", suggest(name, TILE_NAMES) or f"its names are {', '.join(TILE_NAMES)}")
            if name in found or any(given.isdigit() != name.isdigit() for given in found):
                raise self.bad(argument, "@tile takes extents in order, or each by its name once", "write @tile(128, 64), or @tile(m=128, n=64)")
            if value < 1:
                raise self.bad(argument.value, f"@tile takes positive integers, got {value}")
            found[name] = value
        if not found:
            raise self.bad(attribute, "@tile without extents", "write @tile(128, 64), or @tile(m=128, n=64)")
        self.hints["tile"] = tuple(found.items())

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
        self.fields["precision"] = "" if name == "auto" else name

    def optimize(self, attribute: syntax.KernelAttribute) -> None:
        value = self.one(attribute)
        name = value.id if isinstance(value, syntax.Name) else value.value if isinstance(value, syntax.String) else ""
        if name not in levels.WORDS:
            raise self.bad(attribute, f"@optimize takes one of {', '.join(levels.WORDS)}", suggest(name, levels.WORDS) or "write @optimize(O1)")
        self.fields["optimize"] = name

    def activations(self, attribute: syntax.KernelAttribute) -> None:
        value = self.one(attribute)
        name = value.id if isinstance(value, syntax.Name) else value.value if isinstance(value, syntax.String) else ""
        if name != "q8":
            raise self.bad(attribute, "@activations takes q8", "write @activations(q8), or leave it out")
        self.fields["activations"] = name

    def flag(self, group: str, *names: str) -> Callable[[syntax.KernelAttribute], None]:
        def read(attribute: syntax.KernelAttribute) -> None:
            if attribute.args:
                raise self.bad(attribute, f"@{attribute.name} takes no arguments")
            for name in names:
                {"fields": self.fields, "hints": self.hints, "constraints": self.constraints}[group][name] = True

        return read

    def number(self, group: str, name: str, least: int, most: int) -> Callable[[syntax.KernelAttribute], None]:
        def read(attribute: syntax.KernelAttribute) -> None:
            value = self.integer(self.one(attribute), f"@{attribute.name}")
            if not least <= value <= most:
                raise self.bad(attribute, f"@{attribute.name} takes a whole number from {least} to {most}, got {value}")
            {"fields": self.fields, "hints": self.hints}[group][name] = value

        return read

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
            "deterministic": self.flag("fields", "deterministic"),
            "precision": self.precision,
            "optimize": self.optimize,
            "activations": self.activations,
            "async": self.flag("fields", "is_async"),
            "device_function": self.flag("fields", "is_device_function"),
            "gpu_compute": self.flag("fields", "gpu_only"),
            "max_registers": self.number("fields", "max_registers", LEAST_REGISTERS, MOST_REGISTERS),
            "tensor_cores": self.flag("hints", "use_tensor_cores"),
            "vectorizable": self.flag("fields", "vectorizable"),
            "vector": self.number("hints", "vector_width", 1, MOST_VECTOR),
            "unroll": self.number("hints", "unroll_factor", 1, MOST_UNROLL),
            "async_copy": self.flag("hints", "async_copy"),
            "unchecked": self.flag("constraints", "unsafe_unchecked"),
        }


def constant(expr: syntax.Expr) -> int | float | bool | None:
    """The number an expression of literals means, or None."""
    if isinstance(expr, syntax.Number | syntax.Bool):
        return None if isinstance(expr.value, complex) else expr.value
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


def read_attributes(attributes: Sequence[syntax.KernelAttribute], sink: Diagnostics, place: str = BLOCK) -> KernelMetadata:
    """The metadata these attributes describe; what is wrong goes to the sink. `place` is what they stand on."""
    reader = _MetadataReader(sink)
    table = reader.table()
    for attribute in attributes:
        if is_allowed(attribute, sink, place):
            try:
                table[attribute.name](attribute)
            except _Bad:
                continue
    values = dict(reader.fields)
    values["hints"] = KernelHints(**reader.hints)  # type: ignore[arg-type]  # collected by name above
    values["constraints"] = ExecutionConstraints(**reader.constraints)  # type: ignore[arg-type]
    return KernelMetadata(**values)  # type: ignore[arg-type]


def is_allowed(attribute: syntax.KernelAttribute, sink: Diagnostics, place: str) -> bool:
    """Whether there is such an attribute, and it may stand there; if not, the sink has the reason."""
    word = ATTRIBUTE.get(attribute.name)
    if word is None:
        known = [name for name, w in ATTRIBUTE.items() if w.fate != REFUSED and place in w.places]
        help = suggest(attribute.name, known) or f"known attributes: {', '.join(f'@{name}' for name in known)}"
        sink.error("TW011", f"unknown attribute '@{attribute.name}'", attribute.span, help)
    elif word.fate == REFUSED:
        sink.error("TW005", f"@{word.name} is not available: {word.reason}", attribute.span, f"remove @{word.name}")
    elif place not in word.places:
        where = "before fn or pipeline" if FUNCTION in word.places else "on a compute block"
        what = "a function" if place == FUNCTION else "a compute block"
        sink.error("TW012", f"@{word.name} says nothing about {what}", attribute.span, f"write it {where}; {word.form}: {word.effect}")
    else:
        return True
    return False


def kind_numbers(metadata: KernelMetadata) -> dict[str, Value]:
    """The parameters of the kind that are names in the body, with those that were not given."""
    word = KIND.get(metadata.label or metadata.kind.value)
    names = {p.name: p.default for p in word.parameters if p.in_body and p.default is not None} if word is not None else {}
    given = dict(metadata.params)
    return {name: given.get(name, default) for name, default in names.items()} if word is not None else given


def attribute_names() -> tuple[str, ...]:
    """All attributes there are."""
    return tuple(ATTRIBUTE)
