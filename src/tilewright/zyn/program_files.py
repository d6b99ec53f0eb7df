"""Files of ZynML programs: which ones a program may import or read, and their text.

In: paths. Out: texts and paths, or a `UserError`. Programs may come from strangers: what they import or `read` lies under the folder of the program,
or under a folder that was declared (`tw.load(path, roots=[…])`, `--root`, `TILEWRIGHT_ROOTS`), and is a plain file; links count as
where they lead. What is imported is called `.zyn`; the text of a file that is not is in no message.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from contextvars import ContextVar
from pathlib import Path

from tilewright.base import environment
from tilewright.base.errors import UserError
from tilewright.base.source import NOWHERE, Span
from tilewright.frontend.zyn.parse import parse_module
from tilewright.tree import syntax

SUFFIX = ".zyn"
MOST_BYTES = 1 << 26
"""Of one file of text."""
ROOTS: ContextVar[tuple[str, ...]] = ContextVar("ROOTS", default=())
"""Folders declared for all programs, as by the command line."""


def read_program(path: Path, span: Span = NOWHERE, help: str = "give the path of a .zyn file, or the text of a program") -> str:
    """The text of a file, without a byte order mark, its lines ended by `\\n`."""
    try:
        # A pipe is not waited for.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0))
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise UserError.at("TW007", f"file '{path}' cannot be read: it is no plain file", span, help)
            if status.st_size > MOST_BYTES:
                raise UserError.at("TW007", f"file '{path}' has {status.st_size} bytes, more than {MOST_BYTES}", span, "cut it into files that import each other")
            data = file.read()
    except OSError as error:
        reason = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror or error}"
        raise UserError.at("TW007", f"file '{path}' {reason}", span, help) from None
    except ValueError:
        raise UserError.at("TW007", f"{str(path)!r} is no path of a file", span, help) from None
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise UserError.at("TW007", f"file '{path}' is not UTF-8 text: {error.reason}", span, "save it as UTF-8") from None


def parse_program(path: Path, span: Span = NOWHERE, help: str = "give the path of a .zyn file, or the text of a program") -> syntax.Module:
    """The tree of a file. What is wrong with a file of another name is not quoted."""
    text = read_program(path, span, help)
    try:
        return parse_module(text, str(path))
    except UserError as error:
        if path.suffix.lower() == SUFFIX:
            raise
        raise UserError.at("TW001", f"file '{path}' is not ZynML (line {error.span.line})", span, "name programs .zyn to see what is wrong in them") from None


def import_roots(module: syntax.Module, declared: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """The folders imports of a program may lie under: its own, and those declared."""
    source = next((s.span.source.path for s in module.body if s.span.source is not None), "")
    own = Path() if not source or source.startswith("<") else Path(source).parent
    found = [own, *map(Path, (*declared, *ROOTS.get(), *filter(None, environment.text("TILEWRIGHT_ROOTS").split(os.pathsep))))]
    return [_resolved(folder, NOWHERE) for folder in found]


def imported_file(node: syntax.Import, roots: Sequence[Path]) -> tuple[Path, Path]:
    """The path that an import means, as it is written and as it is on disk. Raises UserError where it may not be read."""
    path = _beside(node.path, node.span)
    real = _inside(node.path, path, node.span, roots)
    if path.suffix.lower() != SUFFIX or real.suffix.lower() != SUFFIX:
        raise UserError.at("TW007", f"'{node.path}' is no {SUFFIX} file", node.span, f"only files called {SUFFIX} can be imported")
    return path, real


def readable_file(written: str, span: Span, roots: Sequence[Path]) -> Path:
    """The path that `read("…")` means: beside the text that says so, and where imports may lie, too."""
    path = _beside(written, span)
    _inside(written, path, span, roots)
    return path


def _beside(written: str, span: Span) -> Path:
    """A path as a text names it: relative ones begin in the folder of the text."""
    source = span.source.path if span.source is not None else ""
    if not written.isprintable():
        raise UserError.at("TW007", f"{written!r} is no path of a file", span)
    return (Path(source).parent if source and not source.startswith("<") else Path()) / written


def _inside(written: str, path: Path, span: Span, roots: Sequence[Path]) -> Path:
    """Where the path leads, which has to be under one of the folders."""
    real = _resolved(path, span)
    if not any(real.is_relative_to(root) for root in roots):
        raise UserError.at(
            "TW007", f"'{written}' lies outside the folder of the program, '{roots[0]}'", span,
            "move it there, or declare its folder: tw.load(path, roots=[…]), --root FOLDER on the command line",
        )  # fmt: skip
    return real


def _resolved(path: Path, span: Span) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a circle of links, a name that is too long
        raise UserError.at("TW007", f"{str(path)!r} is no path of a file: {type(error).__name__}", span) from None
