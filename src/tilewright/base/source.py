"""Where a piece of program came from: files of source text and spans inside them.

Every syntax node, typed node and IR op carries a `Span`, so that any stage can report an error at the place the user wrote.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Source:
    """One file (or one string) of program text. `first_line` is the line number of the text's first line in `path`."""

    path: str
    text: str = field(repr=False)
    first_line: int = 1

    def line(self, number: int) -> str:
        # Not splitlines(): lexers count `\n` alone, and a line must be the one they mean.
        lines = self.text.split("\n")
        index = number - self.first_line
        return lines[index].rstrip("\r") if 0 <= index < len(lines) else ""


@dataclass(frozen=True, slots=True)
class Span:
    """A range of text: 1-based lines and columns, the end exclusive in its column."""

    source: Source | None = field(default=None, compare=False, repr=False)
    line: int = 0
    column: int = 0
    end_line: int = 0
    end_column: int = 0
    via: Span | None = field(default=None, repr=False)
    """Where the kernel that this text belongs to was called, if another kernel's body has it."""

    def called_at(self, call: Span) -> Span:
        """This text as part of a body that stands for a call."""
        return replace(self, via=call if self.via is None else self.via.called_at(call))

    def calls(self) -> Iterator[Span]:
        """The calls that led here, the innermost first."""
        call = self.via
        while call is not None:
            yield call
            call = call.via

    @property
    def path(self) -> str:
        return self.source.path if self.source else "<generated>"

    def place(self) -> str:
        """`file:line:column`, or just the file when the place is unknown."""
        return f"{self.path}:{self.line}:{self.column}" if self.line else self.path

    def places(self) -> str:
        """The place, and those of the calls that led to it."""
        return ", called at ".join(span.place() for span in (self, *self.calls()))

    def excerpt(self) -> str:
        """The source line with a caret line under it; empty when the text is not at hand."""
        if not self.source or not self.line:
            return ""
        text = self.source.line(self.line)
        if not text:
            return ""
        last = self.end_column if self.end_line == self.line else len(text) + 1
        width = max(1, last - self.column)
        number = str(self.line)
        pad = " " * len(number)
        return f" {pad} |\n {number} | {text}\n {pad} | {' ' * (self.column - 1)}{'^' * width}"


NOWHERE = Span()
