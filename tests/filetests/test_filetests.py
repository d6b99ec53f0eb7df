"""Runs every `*.kir` file here by the directives in the comments at its top; `docs/ir.md` explains them.

A directive is a line `; name` or `; name: argument` in the first block of comments (`;;` starts a remark). Directives run
in order and share a `Case`. To add one, write a function `(case, argument)` that fails by `assert`, and list it in
`DIRECTIVES`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pytest

from tilewright.base.errors import CompilerBug, UserError
from tilewright.ir.nodes import Kernel
from tilewright.ir.program import Program
from tilewright.ir.text import print_kernel, print_program
from tilewright.ir.text_parse import parse_kernel, parse_program
from tilewright.ir.verify import verify_kernel, verify_program

FOLDER = Path(__file__).parent


@dataclass
class Case:
    """One file: its text under the directives, and what the directives have made of it so far."""

    path: Path
    text: str
    directives: list[tuple[str, str]]
    changed: Kernel | Program | None = field(default=None)
    """Set by directives that transform the IR."""

    @cached_property
    def parsed(self) -> Kernel | Program:
        whole = self.path.read_text()
        return parse_program(whole, self.path.name) if self.is_program else parse_kernel(whole, self.path.name)

    @property
    def is_program(self) -> bool:
        return self.text.startswith("program")

    @property
    def current(self) -> Kernel | Program:
        return self.changed or self.parsed

    @property
    def printed(self) -> str:
        locations = " path=" in self.text.splitlines()[0]
        if isinstance(self.current, Program):
            return print_program(self.current, locations)
        return print_kernel(self.current, locations)


def read_case(path: Path) -> Case:
    lines = path.read_text().splitlines(keepends=True)
    count = 0
    directives: list[tuple[str, str]] = []
    while count < len(lines) and (lines[count].startswith(";") or not lines[count].strip()):
        match = re.match(r"; *([a-z-]+)(?:: *(.*?))? *$", lines[count])
        if match:
            directives.append((match.group(1), match.group(2) or ""))
        else:
            assert not lines[count].startswith("; "), f"{path.name}:{count + 1}: not a directive: {lines[count]}"
        count += 1
    return Case(path, "".join(lines[count:]), directives)


# -- directives -----------------------------------------------------------------------------------------------------


def expectation(argument: str) -> str | None:
    """None for `ok`, the substring for `error "substring"`."""
    if argument == "ok":
        return None
    match = re.fullmatch(r'error (".*")', argument)
    assert match, f'expected `ok` or `error "substring"`, got {argument!r}'
    return str(json.loads(match.group(1)))


def directive_parse(case: Case, argument: str) -> None:
    """`; parse: ok` or `; parse: error "substring"`."""
    expected = expectation(argument)
    if expected is None:
        assert case.parsed
        return
    with pytest.raises(UserError) as caught:
        _ = case.parsed
    assert caught.value.code == "TW041"
    assert expected in str(caught.value)


def directive_verify(case: Case, argument: str) -> None:
    """`; verify: ok` or `; verify: error "substring"`."""
    expected = expectation(argument)
    current = case.current
    if expected is None:
        verify_program(current) if isinstance(current, Program) else verify_kernel(current)
        return
    with pytest.raises(CompilerBug) as caught:
        verify_program(current) if isinstance(current, Program) else verify_kernel(current)
    assert caught.value.code == "TW042"
    assert expected in str(caught.value)


def directive_roundtrip(case: Case, argument: str) -> None:
    """`; roundtrip`: the text is exactly what its IR prints as."""
    assert case.printed == case.text


def directive_check(case: Case, argument: str) -> None:
    """`; check: substring` of the IR as it is now."""
    assert argument in case.printed


def directive_check_not(case: Case, argument: str) -> None:
    """`; check-not: substring`."""
    assert argument not in case.printed


Directive = Callable[[Case, str], None]
DIRECTIVES: dict[str, Directive] = {
    "parse": directive_parse,
    "verify": directive_verify,
    "roundtrip": directive_roundtrip,
    "check": directive_check,
    "check-not": directive_check_not,
}


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.kir")), ids=lambda path: str(path.relative_to(FOLDER)))
def test_file(path: Path) -> None:
    case = read_case(path)
    assert case.directives, f"{path.name} asks for nothing"
    for name, argument in case.directives:
        assert name in DIRECTIVES, f"{path.name}: unknown directive {name!r}"
        DIRECTIVES[name](case, argument)
