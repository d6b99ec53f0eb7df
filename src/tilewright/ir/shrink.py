"""The reducer: a kernel that fails and a test of failure in, a small kernel that still fails out.

It tries edits that make the kernel smaller and keeps those after which it verifies and still fails, until none is left:
drop ops (many at once, then singly) with zeros for their results, put an operand for a result, unwrap loops and branches,
drop dimensions, shrink tile shapes, and strip parameters, facts and attributes. Every kept edit lowers `cost`, so it ends.
A kernel that does not verify to begin with is shrunk without that condition.

    python -m tilewright.ir.shrink FILE.kir --command 'cmd {}'

runs the command on each candidate (`{}` is the file) and keeps what exits with the status the whole kernel exits with.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from types import MappingProxyType

from tilewright.base.dtypes import i64
from tilewright.base.errors import CompilerBug, TilewrightError, UserError
from tilewright.base.sizes import ONE
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Attrs, Block, Kernel, Op, Value, walk
from tilewright.ir.ops import OPS, TypeRuleError, result_types
from tilewright.ir.rewrite import has_effects, use_counts
from tilewright.ir.text import print_kernel
from tilewright.ir.text_parse import parse_kernel
from tilewright.ir.types import INDEX, Scalar, Tile, Type, Vec
from tilewright.ir.verify import verify_kernel

StillFails = Callable[[Kernel], bool]
Edit = Callable[[], Sequence[Kernel]]
"""Makes candidates, the smallest first; none where the edit does not apply."""
Strategy = Callable[[Kernel], list[Edit]]

LEAVES = frozenset({"const", "size", "broadcast", "yield"})
"""Ops that count little: zeros are made of them."""


def shrink_kernel(kernel: Kernel, still_fails: StillFails) -> Kernel:
    """The smallest kernel found that still fails."""
    if not still_fails(kernel):
        raise UserError.at("TW016", f"kernel @{kernel.name} does not fail, so there is nothing to shrink", kernel.span)
    return _Search(still_fails, _verifies(kernel)).run(kernel)


def cost(kernel: Kernel) -> tuple[int, int, int, int]:
    """What shrinking lowers: real ops and loop indices, then elements of tiles, then all ops, then text."""
    work = elements = count = 0
    for op in walk(kernel.body):
        count += 1
        work += (op.opcode not in LEAVES) + sum(len(region.args) for region in op.regions)
        elements += sum(prod(r.type.shape) for r in op.results if isinstance(r.type, Tile))
    return work, elements, count, len(print_kernel(kernel))


def _verifies(kernel: Kernel) -> bool:
    try:
        verify_kernel(kernel)
    except CompilerBug:
        return False
    return True


class _Search:
    def __init__(self, still_fails: StillFails, must_verify: bool) -> None:
        self.still_fails = still_fails
        self.must_verify = must_verify
        self.tried: set[str] = set()

    def run(self, kernel: Kernel) -> Kernel:
        while True:
            before = kernel
            for strategy in (*_dropping(kernel), _forward, _unwrap, _drop_dimensions, _shrink_shapes, _strip):
                kernel = self.exhaust(kernel, strategy)
            if kernel is before:
                return kernel

    def exhaust(self, kernel: Kernel, strategy: Strategy) -> Kernel:
        """Try each edit of the strategy once; after a success the next edit has moved to the same position."""
        position = 0
        edits, limit = strategy(kernel), cost(kernel)
        while position < len(edits):
            for candidate in edits[position]():
                if self.accepts(candidate, limit):
                    kernel = candidate
                    edits, limit = strategy(kernel), cost(kernel)
                    break
            else:
                position += 1
        return kernel

    def accepts(self, candidate: Kernel, limit: tuple[int, int, int, int]) -> bool:
        if cost(candidate) >= limit or (self.must_verify and not _verifies(candidate)):
            return False
        text = print_kernel(candidate)
        if text in self.tried:
            return False
        self.tried.add(text)
        return self.still_fails(candidate)


# -- edits ----------------------------------------------------------------------------------------------------------


def _dropping(kernel: Kernel) -> list[Strategy]:
    """Drop half of the ops, then quarters… down to single ones."""
    strategies: list[Strategy] = []
    chunk = max(1, sum(1 for _ in walk(kernel.body)) // 2)
    while chunk:
        strategies.append(partial(_drop_chunks, chunk))
        chunk //= 2
    return strategies


def _drop_chunks(chunk: int, kernel: Kernel) -> list[Edit]:
    used = use_counts(kernel.body)
    ops = [op for op in walk(kernel.body) if _droppable(op, used)]
    # Last ops first: their operands are then unused and go with them.
    groups = [ops[max(0, end - chunk) : end] for end in range(len(ops), 0, -chunk)]
    return [partial(_rebuilt, kernel, dict.fromkeys(group, _zeros)) for group in groups]


def _droppable(op: Op, used: Mapping[Value, int]) -> bool:
    replaceable = all(isinstance(r.type, Scalar | Vec | Tile) or r not in used for r in op.results)
    return op.opcode not in ("yield", "parallel") and replaceable


def _forward(kernel: Kernel) -> list[Edit]:
    """Put an operand of the same type in the place of a result."""
    return [
        partial(_rebuilt, kernel, {op: partial(_values, (operand,))})
        for op in walk(kernel.body)
        if len(op.results) == 1
        for operand in dict.fromkeys(op.operands)
        if operand.type == op.result.type
    ]


def _unwrap(kernel: Kernel) -> list[Edit]:
    """Put the body of a loop, reduction or branch in its place, run once; or the initial values of a loop."""
    edits: list[Edit] = []
    for op in walk(kernel.body):
        if op.opcode in ("for", "while"):
            initial = op.operands[3:] if op.opcode == "for" else op.operands
            edits.append(partial(_rebuilt, kernel, {op: partial(_values, initial)}))
        if op.opcode in ("for", "while", "if", "reduce"):
            for region in op.regions[-1:] if op.opcode == "while" else op.regions:
                edits.append(partial(_rebuilt, kernel, {op: partial(_inlined, region)}))
    return edits


def _drop_dimensions(kernel: Kernel) -> list[Edit]:
    """Take one index out of a `parallel` or `reduce`: it becomes 0."""
    return [
        partial(_rebuilt, kernel, {op: partial(_without_axis, axis)})
        for op in walk(kernel.body)
        if op.opcode in ("parallel", "reduce")
        for axis in range(len(op.operands))
    ]


def _shrink_shapes(kernel: Kernel) -> list[Edit]:
    """Make an extent of tiles 1, or half, in every `shape`; types follow."""
    shapes: dict[Op, tuple[int, ...]] = {}
    for op in walk(kernel.body):
        shape = op.attrs.get("shape")
        if isinstance(shape, tuple):
            shapes[op] = tuple(e for e in shape if isinstance(e, int))
    edits: list[Edit] = []
    for extent in sorted({e for shape in shapes.values() for e in shape if e > 1}, reverse=True):
        for target in dict.fromkeys((1, extent // 2)):
            changes: dict[Op, Change] = {}
            for op, shape in shapes.items():
                smaller = tuple(target if e == extent else e for e in shape)
                changes[op] = partial(_with_attrs, MappingProxyType({**op.attrs, "shape": smaller}))
            edits.append(partial(_rebuilt, kernel, changes))
    return edits


def _strip(kernel: Kernel) -> list[Edit]:
    """Take away parameters, facts, attributes, grid axes and threads."""
    used = use_counts(kernel.body)
    unused = [param for param in kernel.params if param not in used]
    candidates = [replace(kernel, params=tuple(p for p in kernel.params if p is not param)) for param in unused]
    for name in kernel.facts:
        facts = {key: divisor for key, divisor in kernel.facts.items() if key != name}
        candidates.append(replace(kernel, facts=MappingProxyType(facts)))
    candidates += [replace(kernel, attrs=_without(kernel.attrs, name)) for name in kernel.attrs]
    candidates += [replace(kernel, threads=1), replace(kernel, threads=max(1, kernel.threads // 2))]
    if kernel.grid:
        grids = [(ONE,), (ONE,) * len(kernel.grid), kernel.grid[:-1]]
        candidates += [replace(kernel, grid=grid) for grid in grids]
    edits: list[Edit] = [partial(list, [candidate]) for candidate in candidates]
    for op in walk(kernel.body):
        for name in op.attrs:
            edits.append(partial(_rebuilt, kernel, {op: partial(_with_attrs, _without(op.attrs, name))}))
    return edits


def _without(attrs: Attrs, name: str) -> Attrs:
    return MappingProxyType({key: value for key, value in attrs.items() if key != name})


# -- making a changed copy ------------------------------------------------------------------------------------------


class _Copy:
    """Copies ops with fresh values, some changed. Types are worked out anew where those of the operands changed."""

    def __init__(self, changes: Mapping[Op, Change], dead: set[Op]) -> None:
        self.changes = changes
        self.dead = dead
        self.kept: set[Op] = set()
        """Copies of ops that had no use before: it is for other edits to drop those."""
        self.mapping: dict[Value, Value] = {}

    def value(self, value: Value) -> Value:
        return self.mapping.get(value, value)

    def op(self, builder: Builder, op: Op) -> None:
        change = self.changes.get(op)
        with builder.at(op.span):
            results = change(self, builder, op) if change else self.copied(builder, op, op.attrs)
        self.mapping.update(zip(op.results, results, strict=True))

    def copied(self, builder: Builder, op: Op, attrs: Attrs) -> tuple[Value, ...]:
        operands = tuple(map(self.value, op.operands))
        before, after = [o.type for o in op.operands], [o.type for o in operands]
        carried = after[3:] if op.opcode == "for" else after
        types = [r.type for r in op.results]
        loops = op.opcode in ("for", "while") and before != after
        args = [([after[0]] if op.opcode == "for" else []) + carried] * len(op.regions) if loops else [
            [a.type for a in region.args] for region in op.regions
        ]  # fmt: skip
        regions = tuple(map(self.region, op.regions, args))
        if loops:
            types = carried
        elif op.opcode in ("if", "reduce"):
            types = [v.type for v in regions[0].yields]
        elif op.opcode in OPS and (before != after or attrs is not op.attrs):
            inferred = result_types(op.opcode, after, attrs)
            types = [_with_layout(new, old) for new, old in zip(inferred, types, strict=True)]
        results = tuple(Value(t, r.name) for t, r in zip(types, op.results, strict=True))
        copy = Op(op.opcode, operands, results, attrs, regions, op.span)
        if op in self.dead:
            self.kept.add(copy)
        return builder.append(copy)

    def region(self, region: Block, types: Sequence[Type]) -> Block:
        args = tuple(Value(t, a.name) for t, a in zip(types, region.args, strict=True))
        self.mapping.update(zip(region.args, args, strict=True))
        builder = Builder()
        for op in region.ops:
            self.op(builder, op)
        return Block(args, tuple(builder.ops))


Change = Callable[[_Copy, Builder, Op], Sequence[Value]]
"""Builds what stands for an op and returns the values of its results."""


def _rebuilt(kernel: Kernel, changes: Mapping[Op, Change]) -> list[Kernel]:
    """The kernel with these ops changed: without what nobody uses any more, and (the failure may need it) with it."""
    used = use_counts(kernel.body)
    copy = _Copy(changes, {op for op in walk(kernel.body) if not any(r in used for r in op.results)})
    try:
        body = copy.region(kernel.body, ())
        bodies = [_without_dead(body, set(), copy.kept, everything) for everything in (True, False)]
    except (TypeRuleError, TilewrightError, LookupError, ValueError):
        # The last two: IR that never verified may be malformed in any way, and some edits count on its form.
        return []
    return [replace(kernel, body=body) for body in bodies]


def _without_dead(block: Block, live: set[Value], kept: set[Op], everything: bool) -> Block:
    """Without ops (or else just leaves) that are unused and have no effect, but for those in `kept`.

    Backwards, as uses come after definitions.
    """
    ops: list[Op] = []
    for op in reversed(block.ops):
        unused = op.opcode in OPS and op.opcode != "yield" and op not in kept and not any(r in live for r in op.results)
        if unused and (everything or op.opcode in LEAVES) and not has_effects(op):
            continue
        live.update(op.operands)
        if op.regions:
            op = replace(op, regions=tuple(_without_dead(region, live, kept, everything) for region in op.regions))
        ops.append(op)
    return Block(block.args, tuple(reversed(ops)))


def _with_layout(new: Type, old: Type) -> Type:
    """Layouts are assigned, not inferred, so they stay."""
    return replace(new, layout=old.layout) if isinstance(new, Tile) and isinstance(old, Tile) else new


def _zeros(copy: _Copy, builder: Builder, op: Op) -> list[Value]:
    """Zeros for the results, layouts included; a result that is no number has no use and stays what it is."""
    results: list[Value] = []
    for r in op.results:
        if isinstance(r.type, Scalar | Vec | Tile):
            zero = builder.like(builder.const(0, r.type.dtype), r)
            if zero.type != r.type:
                last = builder.ops.pop()
                (zero,) = builder.append(replace(last, results=(Value(r.type),)))
            results.append(zero)
        else:
            results.append(r)
    return results


def _values(values: Sequence[Value], copy: _Copy, builder: Builder, op: Op) -> list[Value]:
    return [copy.value(v) for v in values]


def _with_attrs(attrs: Attrs, copy: _Copy, builder: Builder, op: Op) -> Sequence[Value]:
    return copy.copied(builder, op, attrs)


def _inlined(region: Block, copy: _Copy, builder: Builder, op: Op) -> list[Value]:
    """The region's ops, run once: a loop from its start, a reduction at index 0."""
    if op.opcode == "for":
        initial = [op.operands[0], *op.operands[3:]]
    elif op.opcode == "reduce":
        initial = [builder.const(0, i64) for _ in region.args]
    else:
        initial = list(op.operands) if op.opcode == "while" else []
    copy.mapping.update(zip(region.args, map(copy.value, initial), strict=True))
    for inner in region.ops[:-1]:
        copy.op(builder, inner)
    return [copy.value(v) for v in region.yields]


def _without_axis(axis: int, copy: _Copy, builder: Builder, op: Op) -> Sequence[Value]:
    """The op without one of its indices, which becomes 0; the last index of a reduction stays."""
    (region,) = op.regions
    copy.mapping[region.args[axis]] = builder.const(0, i64)
    smaller = Block(tuple(a for k, a in enumerate(region.args) if k != axis), region.ops)
    operands = tuple(o for k, o in enumerate(op.operands) if k != axis)
    block = copy.region(smaller, [INDEX] * len(operands))
    results = tuple(Value(v.type, r.name) for v, r in zip(block.yields, op.results, strict=True))
    return builder.append(Op(op.opcode, tuple(map(copy.value, operands)), results, op.attrs, (block,), op.span))


# -- command line ---------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Shrink a file by a command; the result goes to a file or to standard output."""
    parser = argparse.ArgumentParser(prog="python -m tilewright.ir.shrink", description="Shrink a kernel that fails.")
    parser.add_argument("file", type=Path, help="a kernel in text form")
    parser.add_argument("--command", required=True, help="what to run; {} is the file with the candidate")
    parser.add_argument("--expect", default="", help="text the output must hold to count as the same failure")
    parser.add_argument(
        "--timeout", type=float, default=60.0, help="seconds one run may take; a longer one does not count"
    )
    parser.add_argument("--output", type=Path, help="where to write the small kernel")
    options = parser.parse_args(arguments)
    try:
        kernel = parse_kernel(options.file.read_text(), str(options.file))
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "candidate.kir"
            status, _ = _run(options.command, file, kernel, options.timeout)

            def still_fails(candidate: Kernel) -> bool:
                found, output = _run(options.command, file, candidate, options.timeout)
                return found not in (0, None) and found == status and options.expect in output

            text = print_kernel(shrink_kernel(kernel, still_fails))
    except TilewrightError as error:
        print(error, file=sys.stderr)
        return 1
    if options.output:
        options.output.write_text(text)
    else:
        print(text, end="")
    return 0


def _run(command: str, file: Path, kernel: Kernel, timeout: float) -> tuple[int | None, str]:
    """Exit status (None when out of time) and output of the command on this kernel."""
    file.write_text(print_kernel(kernel))
    words = [word.replace("{}", str(file)) for word in shlex.split(command)]
    try:
        result = subprocess.run(words, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return None, ""
    return result.returncode, result.stdout + result.stderr


if __name__ == "__main__":
    sys.exit(main())
