"""`tilewright inspect --fusion`: which loops of a kernel became one launch, which did not, and why.

In: a file, what its arguments are, a target; nothing is run. Out: for each kernel the arrays that no longer pass through memory, with the
lines that make and use them and the bytes saved; and those that still do, with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import click

from tilewright.base.sizes import Size
from tilewright.base.source import Span
from tilewright.base.target import parse_target
from tilewright.cli.guess import parse_arguments
from tilewright.cli.inspect_command import sizes_of
from tilewright.cli.sources import choose, read_source, walk
from tilewright.compile.driver import Compilation, compile_stages

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
    entries = choose(walk(read_source(path), parse_arguments(arguments), kernel).raise_if_errors().entries, kernel, path)
    found = []
    for entry in entries:
        done = compile_stages(entry.function, entry.signature(target.is_gpu), target)
        found.append((entry.name, done, sizes_of(entry, done)))
    if as_json:
        click.echo(json.dumps([_plain(*item) for item in found], indent=2))
    else:
        click.echo("\n\n".join(_text(*item) for item in found))


def _text(name: str, done: Compilation, sizes: Mapping[str, int]) -> str:
    report = done.fusion
    lines = [f"{name}: {_count(report.before)} as written, {report.after} after fusion"]
    for made in report.fused:
        lines.append(
            f"  {made.array}: {_WAYS[made.how]} ({_line(made.producer)} and {_line(made.consumer)}); {_bytes(made.saved, sizes)} not moved"
        )
    for kept in report.refused:
        lines.append(f"  {kept.array}: stays in memory ({_line(kept.producer)} to {_line(kept.consumer)}): {kept.reason}")
    if not report.fused and not report.refused:
        lines.append("  no array passes from one kernel to another")
    return "\n".join(lines)


def _count(kernels: int) -> str:
    return f"{kernels} kernel" + ("" if kernels == 1 else "s")


def _line(span: Span) -> str:
    return f"line {span.line}"


def _bytes(size: Size, sizes: Mapping[str, int]) -> str:
    if not size.names <= sizes.keys():
        return f"{size} bytes"
    number = float(size.evaluate(sizes))
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            break
        number /= 1024
    return f"{number:.4g} {unit}"


def _plain(name: str, done: Compilation, sizes: Mapping[str, int]) -> dict[str, object]:
    report = done.fusion
    return {
        "name": name, "before": report.before, "after": report.after,
        "fused": [
            {"array": f.array, "how": f.how, "made": f.producer.place(), "used": f.consumer.place(), "bytes": str(f.saved),
             "saved": f.saved.evaluate(sizes) if f.saved.names <= sizes.keys() else None}
            for f in report.fused
        ],
        "kept": [{"array": r.array, "made": r.producer.place(), "used": r.consumer.place(), "reason": r.reason} for r in report.refused],
    }  # fmt: skip
