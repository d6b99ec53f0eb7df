"""Where the text of live code is. In: a code object. Out: the lines it was compiled from, or none.

Python keeps the text of files and of notebook cells (`linecache`). It keeps none of strings given to `exec`, of `python -c`, of a program
that is read from standard input, and, before Python 3.13, of what is typed at its prompt. Such text is still somewhere while the
code runs: in a variable of the frame that called `exec`, in the command line, in the file that is standard input, in the prompt's
history. A text found there counts only if it compiles to the same code, with the same places, and so does what stands around it
(annotations are no part of a function's own code); so no other text is taken for it.

`keep_source` is called where a function becomes a kernel, while those frames are alive. `run_source` runs a text and keeps it.
"""

from __future__ import annotations
import __future__

import functools
import hashlib
import itertools
import linecache
import os
import re
import stat
import sys
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from tilewright.base.errors import UserError

_FUTURE = functools.reduce(int.__or__, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names))
_MOST_TEXTS, _MOST_LINES, _MOST_CHARACTERS = 64, 200, 1 << 24
_kept: dict[int, tuple[weakref.ref[types.CodeType], str]] = {}
"""The text that each code object was found in, by identity: equal code may have other annotations."""
_texts: dict[str, None] = {}
"""Texts that some code was found in, the latest last: other functions may be in them, too."""


def keep_source(function: object) -> None:
    """Remember the text of a function that may be read later, when nobody holds that text any more."""
    code = getattr(function, "__code__", None)
    if not isinstance(code, types.CodeType):
        return
    path = code.co_filename
    if path in linecache.cache and not path.startswith("<"):
        linecache.checkcache(path)  # a module that was changed and loaded again
    elif path.startswith("<") or not os.path.exists(path):
        lines = lines_of(code, getattr(function, "__globals__", None))
        if lines:
            _remember(code, "".join(lines))  # some notebooks give the next cell the name of this one


def lines_of(code: types.CodeType, names: dict[str, object] | None = None) -> list[str]:
    """The lines of the text a code object is from, counted as the code counts them. None where the text is not to be found."""
    kept = _kept.get(id(code))
    if kept is not None and kept[0]() is code:
        return kept[1].splitlines(keepends=True)
    lines = linecache.getlines(code.co_filename, names)
    if lines:
        return lines
    text = _found(code)
    if text is None:
        return []
    _remember(code, text)
    return text.splitlines(keepends=True)


def missing_source(name: str, code: types.CodeType | None, what: str = "kernel") -> UserError:
    """The error for a function whose text is nowhere."""
    path = code.co_filename if code is not None else ""
    way = f"define the {what} in a file or a notebook cell"
    if path == "<stdin>":
        way = f"{way}, or start Python with 'python - < file': what comes through a pipe is gone once it is read"
    elif path.startswith("<"):
        way = f"{way}, hold the text in a variable while exec runs it, or run it with tw.run_source(text)"
    place = f": {path} keeps none" if path else ""
    error = UserError.at("TW007", f"the source of '{name}' is not available{place}", help=way)
    assert isinstance(error, UserError)
    return error


def run_source(text: str, names: dict[str, Any] | None = None) -> dict[str, Any]:
    """Run Python text that defines kernels, and keep it as their source. Gives the names it defined.

    `names` are what the text finds, and where its own names go: `run_source(text, {"width": 4})["scale"](x)`.
    """
    if not isinstance(text, str):
        raise UserError.at("TW009", f"run_source takes Python text, got a {type(text).__name__}")
    path = f"<text {hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()[:12]}>"
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    space: dict[str, object] = {} if names is None else names
    space.setdefault("__name__", "__main__" if names is None else "<text>")
    exec(compile(text, path, "exec", dont_inherit=True), space)
    space.pop("__builtins__", None)
    return space


def _remember(code: types.CodeType, text: str) -> None:
    key = id(code)
    _kept[key] = weakref.ref(code, lambda _: _kept.pop(key, None)), text
    _texts.pop(text, None)
    _texts[text] = None
    if len(_texts) > _MOST_TEXTS:
        _texts.pop(next(iter(_texts)))


def _found(code: types.CodeType) -> str | None:
    code = _around(code)
    for text in _places(code.co_filename):
        if _defines(text, code, "exec") or _defines(text, code, "single"):
            return text
    if code.co_filename != "<stdin>":
        return None
    for text in (_standard_input(), _typed()):
        for statement in _statements(text, code):
            if _defines(statement, code, "single"):
                return statement
    return None


def _around(code: types.CodeType) -> types.CodeType:
    """The code that defines a function right now, or else the function's own."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if any(c is code for c in frame.f_code.co_consts):
            return frame.f_code
        frame = frame.f_back
    return code


def _places(path: str) -> Iterator[str]:
    """Texts that may hold the code, those first that most likely do."""
    if path == "<stdin>":
        yield _standard_input()
    arguments = sys.orig_argv
    yield from (text for option, text in itertools.pairwise(arguments) if option.startswith("-") and option.endswith("c"))
    frame: types.FrameType | None = sys._getframe(1)
    seen: set[int] = set()
    while frame is not None:
        if not str(frame.f_globals.get("__name__", "")).startswith("tilewright."):
            for held in (frame.f_code.co_consts, frame.f_locals.values(), frame.f_globals.values() if id(frame.f_globals) not in seen else ()):
                yield from _strings(held)
            seen.add(id(frame.f_globals))
        frame = frame.f_back
    yield from reversed(list(_texts))


def _strings(values: Iterable[object]) -> Iterator[str]:
    for value in list(values):
        if isinstance(value, str) and type(value) is str:
            yield value
        elif type(value) is bytes:
            yield value.decode("utf-8", errors="replace")


def _standard_input() -> str:
    """The text of the file that standard input is, from its beginning; empty where it is a pipe or a terminal."""
    try:
        status = os.fstat(0)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_CHARACTERS:
            return ""
        return os.pread(0, status.st_size, 0).decode("utf-8", errors="replace")
    except (OSError, AttributeError):  # no standard input, or no pread
        return ""


def _typed() -> str:
    """The history of Python's prompt."""
    readline = sys.modules.get("readline")
    if readline is None:
        return ""
    count = readline.get_current_history_length()
    return "".join(f"{readline.get_history_item(k) or ''}\n" for k in range(max(1, count - 20 * _MOST_LINES), count + 1))


def _statements(text: str, code: types.CodeType) -> Iterator[str]:
    """Statements of a text that may hold the code, the latest first: prompts count the lines of each statement on their own."""
    lines = text.splitlines(keepends=True)
    needle = _needle(code)
    begins = [k for k, line in enumerate(lines) if line.strip() and not line[0].isspace()]
    for place in reversed(range(len(lines))):
        if not needle.search(lines[place]):
            continue
        end = next((k for k in begins if k > place and lines[k][0] not in ")]}#"), len(lines))
        for begin in reversed([k for k in begins if place - _MOST_LINES < k <= place]):
            yield "".join(lines[begin:end]) + "\n"


def _needle(code: types.CodeType) -> re.Pattern[str]:
    if code.co_name == "<lambda>":
        return re.compile(r"\blambda\b")
    return re.compile(r"\b(for|def|lambda)\b" if code.co_name.startswith("<") else rf"\bdef\s+{re.escape(code.co_name)}\b")


def _defines(text: str, code: types.CodeType, mode: str) -> bool:
    """Whether the text compiles to the code."""
    if len(text) > _MOST_CHARACTERS or not _needle(code).search(text):
        return False
    return any(c == code and _positions(c) == _positions(code) for c in _codes(text, mode, code.co_flags & _FUTURE))


def _positions(code: types.CodeType) -> list[tuple[int | None, int | None, int | None, int | None]]:
    return list(code.co_positions())


@functools.lru_cache(maxsize=16)
def _codes(text: str, mode: str, flags: int) -> tuple[types.CodeType, ...]:
    """All code objects of a text; none where it is no Python."""
    try:
        found = [compile(text, "<text>", mode, flags, dont_inherit=True)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    for code in found:
        found += [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return tuple(found)
