"""`tilewright inspect --fusion`: which loops of a kernel became one launch, which did not, and why.

In: a file, what its arguments are, a target; nothing is run. Out: for each kernel the arrays that no longer pass through memory, with the
lines that make and use them and the bytes saved; those that still do, with the reason and how much of them a block would have to keep; and
the launches that are left, with their shapes, registers and shared memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import click

from tilewright.base.record import record
from tilewright.base.sizes import Size
from tilewright.base.source import Span
from tilewright.base.target import Target, parse_target
from tilewright.cli.commands.inspect import Launched, inspect_entry, sizes_of
from tilewright.cli.guess import parse_arguments
from tilewright.cli.sources import Entry, choose, read_source, walk
from tilewright.compile.driver import compile_stages
from tilewright.passes.common.fusion_report import FusionReport


@record
class Report:
    """One kernel of the file: what became of its loops, and the launches that are left."""

    name: str
    fusion: FusionReport
    launches: tuple[Launched, ...]
    sizes: Mapping[str, int]
    target: Target


_WAYS = {
    "merged": "computed right after it is made",
    "continued": "computed in the same loop over rows",
    "rows": "made again from the row's reductions",
    "inlined": "computed where it is used",
    "beside": "computed beside the product it is combined with",
    "shared": "read once for products that are computed side by side",
}


def fusion(path: str, kernel: str | None, arguments: str, target_name: str, as_json: bool) -> None:
    """Print the report of every kernel of the file."""
    target = parse_target(target_name)
    entries = choose(walk(read_source(path), parse_arguments(arguments), kernel, joined=True).raise_if_errors().entries, kernel, path)
    found = [report(entry, target) for entry in entries]
    if as_json:
        click.echo(json.dumps([_plain(item) for item in found], indent=2))
    else:
        click.echo("\n\n".join(_text(item) for item in found))


def report(entry: Entry, target: Target) -> Report:
    """What fusion made of a kernel, compiled for a target."""
    done = compile_stages(entry.function, entry.signature(target.is_gpu), target)
    return Report(entry.name, done.fusion, inspect_entry(entry, target).launches, sizes_of(entry, done), target)


def _text(found: Report) -> str:
    fusion = found.fusion
    lines = [f"{found.name}: {_count(fusion.before)} as written, {fusion.after} after fusion"]
    for made in fusion.fused:
        places = f"({_line(made.producer)} and {_line(made.consumer)})"
        lines.append(f"  {made.array}: {_WAYS[made.how]} {places}; {_bytes(made.saved, found.sizes)} not moved")
    for kept in fusion.refused:
        lines.append(f"  {kept.array}: stays in memory ({_line(kept.producer)} to {_line(kept.consumer)}): {kept.reason}")
        if kept.needed is not None:
            lines.append(f"    one result reads {_bytes(kept.needed, found.sizes)} of it{_room(kept.needed, found)}")
    if not fusion.fused and not fusion.refused:
        lines.append("  no array passes from one kernel to another")
    return "\n".join([*lines, *(f"  launch {_launch(launch)}" for launch in found.launches)])


def _room(needed: Size, found: Report) -> str:
    """How that compares with what a block can keep."""
    if not found.target.max_shared:
        return ""
    room = f"; a block of {found.target.name} has {_bytes(Size.of(found.target.max_shared), {})} of shared memory"
    if not needed.names <= found.sizes.keys():
        return room
    fits = found.target.max_shared // max(1, needed.evaluate(found.sizes))
    return room + (f", room for {fits} such" if fits else ", which is less")


def _launch(launch: Launched) -> str:
    blocks = "" if launch.blocks is None or str(launch.blocks) == launch.grid else f" = {launch.blocks}"
    text = f"{launch.entry}: grid {launch.grid}{blocks}"
    if launch.occupancy is None and launch.resources is None and launch.threads <= 1:
        return text
    registers = f", {launch.resources.registers} registers" if launch.resources is not None else ""
    return f"{text}, {launch.threads} threads{registers}, {launch.shared_bytes} bytes shared"


def _count(kernels: int) -> str:
    return f"{kernels} kernel" + ("" if kernels == 1 else "s")


def _line(span: Span) -> str:
    calls = list(span.calls())
    return f"line {span.line}" + "".join(f", called in line {call.line}" for call in calls)


def _bytes(size: Size, sizes: Mapping[str, int]) -> str:
    if not size.names <= sizes.keys():
        return f"{size} bytes"
    number = float(size.evaluate(sizes))
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            break
        number /= 1024
    return f"{number:.4g} {unit}"


def _plain(found: Report) -> dict[str, object]:
    fusion, sizes = found.fusion, found.sizes
    return {
        "name": found.name, "before": fusion.before, "after": fusion.after,
        "fused": [
            {"array": f.array, "how": f.how, "made": f.producer.places(), "used": f.consumer.places(), "bytes": str(f.saved),
             "saved": f.saved.evaluate(sizes) if f.saved.names <= sizes.keys() else None}
            for f in fusion.fused
        ],
        "kept": [
            {"array": r.array, "made": r.producer.places(), "used": r.consumer.places(), "reason": r.reason,
             "needed": None if r.needed is None else str(r.needed)}
            for r in fusion.refused
        ],
        "launches": [
            {"entry": x.entry, "grid": x.grid, "blocks": x.blocks, "threads": x.threads, "shared": x.shared_bytes,
             "registers": None if x.resources is None else x.resources.registers}
            for x in found.launches
        ],
    }  # fmt: skip
