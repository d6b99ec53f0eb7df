"""`tilewright inspect`: what the compiler made of each kernel, and what bounds it.

In: a file, what its arguments are, a target; no device is needed. Out: for each launch the schedule, grid, threads, registers, shared memory,
spills, occupancy, matrix instructions and ways of copying; for the whole call its place under the roofline. Registers and spills are what
`ptxas` or a driver says; where neither is there they are unknown. Operations and bytes come from the loop stage, so they are those of the
program as written, not of a schedule; bytes count each array once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace

import click

from tilewright.analysis.index_proofs import explained
from tilewright.analysis.work import Work, work_of
from tilewright.base import levels
from tilewright.base.artifact import Artifact, Launch
from tilewright.base.errors import TilewrightError
from tilewright.base.occupancy import Occupancy, occupancy
from tilewright.base.record import record
from tilewright.base.sizes import ZERO, Size, product
from tilewright.base.target import Target, parse_target
from tilewright.cli.guess import parse_arguments
from tilewright.cli.plots import Roof, plot_roofline
from tilewright.cli.sources import Entry, choose, read_source, walk
from tilewright.codegen.nvptx import ptxas
from tilewright.codegen.registry import backend_for
from tilewright.compile.build import llvm_text
from tilewright.compile.driver import Compilation, Signature, at_level, compile_kernel, compile_stages, front_end
from tilewright.execute.devices import array_device, devices
from tilewright.ir.nodes import Kernel
from tilewright.ir.types import Tensor, dtype_of
from tilewright.passes.choose.fates import Fate
from tilewright.passes.program.watch_indices import WATCHED, steps_inside

_MATRIX = re.compile(
    r"\b(wgmma)\.mma_async\.sync\.aligned\.([\w.]+)|\b(mma)\.sync\.aligned\.([\w.]+)|\b(tcgen05)\.mma\.([\w.:]+)"
    r"|@llvm\.amdgcn\.(mfma|wmma)\.([\w.]+)\("
)
_COPIES = (("tma", r"\bcp\.async\.bulk\."), ("cp.async", r"\bcp\.async\.c[ag]\."), ("plain", r"\b(?:ld|st)\.global\b"))
_ARITHMETIC = {"e4m3": "f8e4m3", "e5m2": "f8e5m2", "s8": "i8", "f64": "f64.matrix"}


@record
class Resources:
    """What one block takes, and who says so."""

    registers: int
    spill_bytes: int
    static_shared: int
    source: str


@record
class Roofline:
    """Where a call lies. Rates are in TFLOP/s and TB/s, 0 where unknown; `seconds` is what the bound allows at best."""

    operations: int
    bytes: int
    exact: bool
    intensity: float
    arithmetic: str
    peak: float
    bandwidth: float
    ridge: float
    bound: str
    seconds: float


@record
class Launched:
    """One launch of a program."""

    entry: str
    schedule: str
    grid: str
    blocks: int | None
    threads: int
    shared_bytes: int
    resources: Resources | None
    occupancy: Occupancy | None
    matrix: Mapping[str, int]
    """Matrix instructions in the code, with how often they stand there."""
    copies: Mapping[str, int]
    """Ways data is moved, with how many instructions."""


@record
class IndexProof:
    """One index of an access, and why it needs no check as the kernel runs."""

    access: str
    place: str
    axis: int
    checked: bool
    reasons: tuple[str, ...]
    """What proves that it lies inside."""


@record
class Inspected:
    """One kernel of the file."""

    name: str
    arguments: str
    target: str
    chip: str
    launches: tuple[Launched, ...]
    operations: str
    bytes: str
    roofline: Roofline | None
    """None where extents are missing."""
    notes: tuple[str, ...] = ()
    """What makes it slow."""
    attributes: tuple[Fate, ...] = ()
    """What became of attributes that ask for something of schedules."""
    indices: tuple[IndexProof, ...] = ()
    """Of each access, axis by axis, whether its index is checked as the kernel runs."""
    level: str = ""
    """The optimisation level of the code."""
    code_bytes: int = 0


def inspect(
    path: str, kernel: str | None, arguments: str, target_name: str, precision: str | None, as_json: bool, plot: str | None
) -> None:
    """Print what there is to know of the file's kernels."""
    target = parse_target(target_name)
    entries = choose(walk(read_source(path), parse_arguments(arguments), kernel).raise_if_errors().entries, kernel, path)
    found = [inspect_entry(entry, target, precision) for entry in entries]
    if as_json:
        click.echo(json.dumps([_plain(item) for item in found], indent=2))
    else:
        click.echo("\n\n".join(_text(item) for item in found))
    if plot is not None:
        known = [(item.name, item.roofline) for item in found if item.roofline is not None]
        roofs = [Roof(f"{name} {r.arithmetic}", r.intensity, r.peak, r.bandwidth) for name, r in known]
        click.echo(plot_roofline(roofs, target.chip or target.name, plot), err=as_json)


def inspect_entry(entry: Entry, target: Target, precision: str | None = None) -> Inspected:
    """One kernel compiled for a target, looked at from all sides. A precision that is given holds in place of the kernel's own."""
    entry = entry if precision is None else entry.without_precision()
    signature = replace(entry.signature(target.is_gpu), precision=precision or "auto")
    done = compile_stages(entry.function, signature, target)
    artifact = compile_kernel(entry.function, signature, target)
    sizes = sizes_of(entry, done)
    code = artifact.code.decode() if artifact.kind == "ptx" else llvm_text(done.stages.thread, target)[0] if target.kind == "amdgpu" else ""
    resources = _resources(artifact, target) if target.is_gpu else {}
    schedules = [schedule.describe() for schedule in done.stages.schedules]
    if len(schedules) != len(artifact.launches):
        # Kernels that are launched together have one schedule each, and say so themselves.
        schedules = [str(call.kernel.attrs.get("schedule", "")) for call in done.stages.thread.calls]
    launches = tuple(
        _launched(launch, schedule, resources.get(launch.entry), _part(code, launch.entry), sizes, target)
        for launch, schedule in zip(artifact.launches, schedules, strict=True)
    )
    # A reduction cut in two counts as it was written.
    cut = len(done.stages.loop.calls) != len(done.program.calls)
    work = [(call.kernel, work_of(call.kernel)) for call in (done.program if cut else done.stages.loop).calls]
    total = Work(
        sum((w.operations for _, w in work), ZERO), sum((w.bytes for _, w in work), ZERO), all(w.exact for _, w in work)
    )
    arithmetic = _arithmetic([kernel for kernel, _ in work], [launch.matrix for launch in launches])
    peak = target.peak(arithmetic) / _products(done, arithmetic, "tf32" in (precision, done.typed.metadata.precision))
    roofline = _roofline(total, arithmetic, peak, target.bandwidth, sizes)
    return Inspected(
        entry.name, entry.assumptions(), target.name, target.chip, launches, str(total.operations), str(total.bytes), roofline,
        tuple(note.render() for note in done.notes), done.fates, index_proofs(entry, signature, target), at_level(entry.function, target).level or levels.DEFAULT,
        len(artifact.code),
    )  # fmt: skip


def index_proofs(entry: Entry, signature: Signature, target: Target) -> tuple[IndexProof, ...]:
    """The accesses of a kernel as its author wrote them, each once: which indices are proven to lie inside, and by what."""
    typed, program = front_end(entry.function, signature)
    checked = "all" if target.is_host else "stores"
    found: dict[tuple[str, str, int], IndexProof] = {}
    for call in program.calls:
        watched = WATCHED[signature.indices or checked] if signature.indices != "none" and not typed.metadata.of(call.kernel.name).unchecked else ()
        for op, axis, reasons in explained(call.kernel, (*steps_inside(program, call), *program.checks)):
            assert isinstance(op.operands[0].type, Tensor)
            names = ", ".join(value.name or "…" for value in op.operands[1 : 1 + op.operands[0].type.rank])
            access, place = f"{op.operands[0].name}[{names}]", op.span.place() if op.span.line else ""
            found.setdefault((access, place, axis), IndexProof(access, place, axis, reasons is None and op.opcode in watched, reasons or ()))
    return tuple(found.values())


def _launched(
    launch: Launch, schedule: str, resources: Resources | None, code: str, sizes: Mapping[str, int], target: Target
) -> Launched:
    shared = launch.shared_bytes + (resources.static_shared if resources else 0)
    held = occupancy(target, launch.threads, resources.registers, shared) if resources else None
    grid = product(launch.grid)
    blocks = grid.evaluate(sizes) if grid.names <= sizes.keys() else None
    return Launched(
        launch.entry, schedule, " × ".join(map(str, launch.grid)) or "1", blocks, launch.threads, shared, resources, held,
        _count_matrix(code), _count_copies(code),
    )  # fmt: skip


def sizes_of(entry: Entry, done: Compilation) -> dict[str, int]:
    """Values of the size names whose extents were given."""
    given = {(name, axis): extent for name, g in entry.args for axis, extent in enumerate(g.extents or ()) if extent is not None}
    return {b.name: given[b.array, b.axis] for b in done.program.bindings() if not b.stride and (b.array, b.axis) in given}


def _resources(artifact: Artifact, target: Target) -> dict[str, Resources]:
    """By entry, from the assembler, or else from a device of that kind."""
    uses = backend_for(target).uses
    if uses is not None:
        return {name: Resources(u.registers, u.spilled, u.shared, u.source) for name, u in uses(artifact.code).items()}
    said = ptxas.assemble(artifact.code.decode(), target.name) if target.kind == "nvptx" else None
    if said is not None:
        return {name: Resources(a.registers, a.spill_bytes, a.shared_bytes, "ptxas") for name, a in said.items()}
    for device in devices():
        try:
            if device.target.name == target.name and array_device(device) is not None:
                program = device.runtime.load(artifact)
                taken = {launch.entry: program.resources(launch.entry) for launch in artifact.launches}
                label = device.runtime.label
                return {name: Resources(r.registers, r.local_bytes, r.shared_bytes, label) for name, r in taken.items()}
        except TilewrightError:
            continue
    return {}


def _part(code: str, entry: str) -> str:
    """The PTX of one entry, or its LLVM text."""
    for mark in (".entry ", "amdgpu_kernel void @"):
        start = code.find(f"{mark}{entry}(")
        if start >= 0:
            end = code.find(mark, start + 1)
            return code[start : end if end > 0 else len(code)]
    return ""


def _count_matrix(code: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for match in _MATRIX.finditer(code):
        family, shape = next((a, b) for a, b in zip(match.groups()[::2], match.groups()[1::2], strict=True) if a)
        name = f"{family}{'.sync' if family == 'mma' else ''} {shape}"
        found[name] = found.get(name, 0) + 1
    return found


def _count_copies(code: str) -> dict[str, int]:
    counts = {name: len(re.findall(pattern, code)) for name, pattern in _COPIES}
    return {name: count for name, count in counts.items() if count}


def _roofline(work: Work, arithmetic: str, peak: float, bandwidth: float, sizes: Mapping[str, int]) -> Roofline | None:
    if not (work.operations.names | work.bytes.names) <= sizes.keys():
        return None
    operations, nbytes = work.operations.evaluate(sizes), work.bytes.evaluate(sizes)
    intensity = operations / nbytes if nbytes else 0.0
    ridge = peak / bandwidth if bandwidth else 0.0
    bound, seconds = "unknown", 0.0
    if bandwidth and (peak or not operations):
        compute, memory = operations / (peak * 1e12) if operations else 0.0, nbytes / (bandwidth * 1e12)
        bound, seconds = ("compute", compute) if compute > memory else ("memory", memory)
    return Roofline(operations, nbytes, work.exact, intensity, arithmetic, peak, bandwidth, ridge, bound, seconds)


def _products(done: Compilation, arithmetic: str, rounded: bool) -> int:
    """How many products of the matrix unit stand for one product of f32: its factors are sums of several terms unless the kernel asks for rounded ones."""
    field = {"tf32": "tf32_terms", "bf16": "bf16_terms"}.get(arithmetic, "")
    counts = [getattr(schedule, field, 0) for schedule in done.stages.schedules]
    return 1 if rounded else max([1, *counts])


def _arithmetic(kernels: Sequence[Kernel], matrix: Sequence[Mapping[str, int]]) -> str:
    """Which of the target's rates applies: that of the matrix instructions used, or of ordinary arithmetic on the widest elements."""
    for name in (name for counts in matrix for name in counts):
        if name.startswith(("mfma", "wmma")):
            return next(word for word in ("bf16", "f16", "i8") if word in name.replace("iu8", "i8"))
        # m64n256k16.f32.bf16.bf16 or m16n8k16.row.col.f32.bf16.bf16.f32: after the shape, the result and then the operands.
        words = [w for w in name.split()[-1].split(".") if w not in ("row", "col", "satfinite")]
        operand = words[2] if len(words) > 2 else words[-1]
        return _ARITHMETIC.get(operand, operand)
    dtypes = [dtype_of(p.type) for kernel in kernels for p in kernel.params]
    widest = max((d.bits for d in dtypes if d.is_float), default=0)
    # Floats narrower than f32 are computed in f32.
    return "integer" if not widest else "f64" if widest > 32 else "f32"


# -- text -----------------------------------------------------------------------------------------------------------


def _text(item: Inspected) -> str:
    lines = [f"{item.arguments} for {item.target}"]
    for launch in item.launches:
        lines.append(f"  {launch.entry}")
        lines += [f"    {label:<13} {text}" for label, text in _rows(launch, item.target.startswith(("sm_", "gfx")))]
    if item.attributes:
        lines.append("  attributes")
        lines += [f"    {fate.attribute}: {'followed' if fate.followed else 'not followed'}; {fate.text}" for fate in item.attributes]
    if item.indices:
        lines.append("  indices")
        lines += [f"    {_index_line(proof)}" for proof in item.indices]
    if not parse_target(item.target).executed:
        lines.append("  this code is checked, not executed: no device of its kind was in reach")
    lines.append("  the whole call")
    lines += [f"    {label:<13} {text}" for label, text in _call_rows(item)]
    lines += [f"  {line}" for note in item.notes for line in note.splitlines()]
    return "\n".join(lines)


def _index_line(proof: IndexProof) -> str:
    where = f"{proof.access}, axis {proof.axis}" + (f", at {proof.place}" if proof.place else "")
    if proof.reasons:
        return f"{where}: no check, since {' and '.join(proof.reasons)}"
    return f"{where}: {'checked as the kernel runs' if proof.checked else 'not proven, and not checked'}"


def _rows(launch: Launched, gpu: bool) -> list[tuple[str, str]]:
    blocks = "" if launch.blocks is None or str(launch.blocks) == launch.grid else f" = {launch.blocks}"
    rows = [("schedule", launch.schedule), ("grid", launch.grid + blocks)]
    return [*rows, ("threads", str(launch.threads)), *_device_rows(launch)] if gpu else rows


def _call_rows(item: Inspected) -> list[tuple[str, str]]:
    rows = [("code", f"{item.code_bytes} bytes, optimised as {item.level}"), ("operations", item.operations), ("bytes", item.bytes)]
    roof = item.roofline
    if roof is None:
        return [*rows, ("roofline", "unknown without extents; give them with --args")]
    least = "" if roof.exact else "at least "
    rows.append(("", f"{least}{_number(roof.operations)}op, {_number(roof.bytes)}B, {roof.intensity:.4g} op/B"))
    if not roof.bandwidth or not roof.peak:
        return [*rows, ("roofline", f"the peak of {item.chip or item.target} for {roof.arithmetic} is not known")]
    rows.append(("roofline", f"{item.chip}: {roof.peak:.4g} TFLOP/s {roof.arithmetic}, {roof.bandwidth:g} TB/s, ridge at {roof.ridge:.4g} op/B"))
    return [*rows, ("", f"bound by {roof.bound}: at best {_time(roof.seconds)}")]


def _device_rows(launch: Launched) -> list[tuple[str, str]]:
    shared = f"{launch.shared_bytes} bytes"
    if launch.resources is None:
        unknown = f"unknown: no ptxas ({ptxas.INSTALL}) and no such device here"
        rows = [("registers", unknown), ("shared", shared)]
    else:
        r = launch.resources
        rows = [("registers", f"{r.registers} ({r.source})"), ("shared", shared), ("spills", f"{r.spill_bytes} bytes" if r.spill_bytes else "none")]
    if launch.occupancy is not None:
        o = launch.occupancy
        held = f"{o.blocks} block{'' if o.blocks == 1 else 's'} on a multiprocessor, {o.warps} of {o.most_warps} warps ({o.fraction:.0%})"
        rows.append(("occupancy", f"{held}, limited by {' and '.join(o.limits)}"))
    matrix = ", ".join(f"{count} × {name}" for name, count in launch.matrix.items())
    rows.append(("tensor cores", matrix or "none"))
    rows.append(("copies", ", ".join(f"{name} ({count})" for name, count in launch.copies.items()) or "none"))
    return rows


def _number(value: float) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if value < 1000:
            return f"{value:.4g} {unit}"
        value /= 1000
    return f"{value:.4g} P"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.2f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.3f} ms"


def _plain(value: object) -> object:
    """Records as dictionaries."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, Size) else value
