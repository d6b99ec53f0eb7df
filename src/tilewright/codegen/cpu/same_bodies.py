"""One body for functions that are the same but for numbers: the phases of a sum, say.

In: functions of kernels. Out: their LLVM text, where those that differ in sizes and whole numbers alone call one body, which takes these as arguments. A body
is generated once, however many phases there are. What a function computes of sizes moves from the body into the function itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tilewright.codegen.cpu.emitter import FunctionParts

_SIZE = re.compile(r"%s(?:ize)?\d+\b")
_NUMBERS = re.compile(r"  %\w+ = (?:add|sub|mul|icmp \w+)(?: nsw)? i64 (\S+), (\S+)$")
"""Instructions with operands that may be arguments instead."""
_LITERAL = re.compile(r"-?\d+")


def shape(function: FunctionParts) -> str:
    """The function's lines without what may be arguments: functions that share a body have the same."""
    return "\n".join("\0".join(_cut(line)[0]) for line in function.lines)


def shared_text(functions: Sequence[FunctionParts]) -> list[str] | None:
    """The functions' text, of the first with the body; None where they are not the same."""
    first = functions[0]
    if any(not _is_alike(first, other) for other in functions):
        return None
    given: dict[tuple[str, ...], str] = {}
    lines: list[str] = []
    for alike in zip(*(f.lines for f in functions), strict=True):
        if alike.count(alike[0]) == len(alike) and "%s" not in alike[0]:
            lines.append(alike[0])
            continue
        cut = [_cut(line) for line in alike]
        if any(parts != cut[0][0] for parts, _ in cut):
            return None
        text = cut[0][0][0]
        for rest, *values in zip(cut[0][0][1:], *(found for _, found in cut), strict=True):
            text += _operand(tuple(values), given) + rest
        lines.append(text)
    kept = [p for p in first.params if not _is_size(p)]
    numbers = [f"i64 {name}" for name in given.values()]
    reported = kept.pop() if kept and kept[-1].endswith("%report") else None
    body = first.body([*kept, *numbers, *([reported] if reported else [])], lines)
    texts = ["\n".join([*body, *_caller(first, first.entry, [key[0] for key in given]), *first.metadata])]
    return texts + ["\n".join(_caller(f, first.entry, [key[n] for key in given])) for n, f in enumerate(functions[1:], 1)]


def _is_alike(first: FunctionParts, other: FunctionParts) -> bool:
    """Whether all but sizes and lines is the same."""
    plain = [[p for p in f.params if not _is_size(p)] for f in (first, other)]
    same = plain[0] == plain[1] and (first.attributes, first.metadata, len(first.lines)) == (other.attributes, other.metadata, len(other.lines))
    return same and not (other.held or other.parts)


def _is_size(param: str) -> bool:
    return param.startswith("i64 %s")


def _cut(line: str) -> tuple[list[str], list[str]]:
    """A line without the operands that may be arguments, and these."""
    if " i64 " not in line:
        return [line], []
    places = [match.span() for match in _SIZE.finditer(line)]
    instruction = _NUMBERS.match(line)
    if instruction is not None:
        places += [instruction.span(n) for n in (1, 2) if _LITERAL.fullmatch(instruction.group(n))]
    parts, values, end = [], [], 0
    for start, stop in sorted(places):
        parts.append(line[end:start])
        values.append(line[start:stop])
        end = stop
    return [*parts, line[end:]], values


def _operand(values: tuple[str, ...], given: dict[tuple[str, ...], str]) -> str:
    """A number that is the same in all functions, or the argument that it becomes."""
    if values.count(values[0]) == len(values) and not values[0].startswith("%"):
        return values[0]
    return given.setdefault(values, f"%n{len(given)}")


def _caller(function: FunctionParts, called: str, values: Sequence[str]) -> list[str]:
    """A function that calls the common body with numbers of its own."""
    own = {p.split()[-1]: a.split()[-1] for p, a in zip(function.params, function.arguments, strict=True) if _is_size(p)}

    def renamed(text: str) -> str:
        return _SIZE.sub(lambda match: own.get(match.group(), match.group()), text)

    plain = [a for p, a in zip(function.params, function.arguments, strict=True) if not _is_size(p)]
    reported = [plain.pop()] if function.params[-1].endswith("%report") else []
    numbers = [f"i64 {renamed(value)}" for value in values]
    return function.function(called, [renamed(line) for line in function.sizes], [*plain, *numbers, *reported])
