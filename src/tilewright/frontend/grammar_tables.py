"""The parser of a grammar, with its tables kept on disk: making them from `zyn.lark` takes ten times as long as reading them.

In: a grammar's text, and the layout step and tree builder that serve it. Out: a `lark.Lark`. Tables lie in the directory of the compiled
kernels' cache, under a name made of all they depend on; where that cannot be used (or `TILEWRIGHT_CACHE=0`) they are made anew. What is
there is only read if nobody but this user can have written it.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import sys
import tempfile
from pathlib import Path

import lark

_OFF = ("0", "off", "no", "false")
_MAKING = {"parser": "lalr", "lexer": "basic", "keep_all_tokens": True, "maybe_placeholders": False}


def make_parser(grammar: str, layout: object, builder: object) -> lark.Lark:
    """The parser, from kept tables where there are some."""
    path = _place(grammar)
    data = _read(path) if path is not None else None
    if data is not None:
        parser: lark.Lark = lark.Lark.__new__(lark.Lark)
        return parser._load(data, postlex=layout, transformer=builder)
    parser = lark.Lark(grammar, postlex=layout, transformer=builder, **_MAKING)
    if path is not None:
        _write(path, parser)
    return parser


def _place(grammar: str) -> Path | None:
    if os.environ.get("TILEWRIGHT_CACHE", "1").strip().lower() in _OFF:
        return None
    chosen = os.environ.get("TILEWRIGHT_CACHE_DIR")
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        root = Path(chosen) if chosen else (Path(base) if base and os.path.isabs(base) else Path.home() / ".cache") / "tilewright"
    except RuntimeError:  # no home directory
        return None
    depends = repr((grammar, lark.__version__, sys.version_info[:2], sorted(_MAKING.items())))
    return root / "grammar" / f"{hashlib.sha256(depends.encode()).hexdigest()[:32]}.tables"


def _read(path: Path) -> dict[str, object] | None:
    """Kept tables. A digest stands before them: a file that was cut short is no tables."""
    try:
        with open(path, "rb") as file:
            if not _is_own(path.parent) or not _is_own(file.fileno()):
                return None
            content = file.read()
    except OSError:
        return None
    digest, body = content[:32], content[32:]
    if hashlib.sha256(body).digest() != digest:
        return None
    tables: dict[str, object] = pickle.loads(body)
    return tables


def _is_own(place: Path | int) -> bool:
    """Whether only this user can have written there: a pickle is as good as code."""
    if not hasattr(os, "getuid"):
        return True
    found = os.stat(place)
    return found.st_uid == os.getuid() and not found.st_mode & 0o022


def _write(path: Path, parser: lark.Lark) -> None:
    """Keep tables, all of them or none; a directory that cannot be written to is nobody's error."""
    buffer = io.BytesIO()
    parser.save(buffer, ("postlex", "transformer"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(buffer.getvalue()).digest() + buffer.getvalue())
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError:
        return
