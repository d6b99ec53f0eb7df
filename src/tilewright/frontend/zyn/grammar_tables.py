"""The parser of a grammar, with its tables kept on disk: making them from `zyn.lark` takes twenty times as long as reading them.

In: a grammar's text, and the layout step and tree builder that serve it. Out: a `lark.Lark`. The package has the tables of its grammar
(`shipped_tables.py`). With another version of lark than theirs, tables lie in the directory of the compiled kernels' cache, under a name
made of all they depend on; where that cannot be used (or `TILEWRIGHT_CACHE=0`) they are made anew. What is there is only read if nobody
but this user can have written it.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import sys
from pathlib import Path

import lark

from tilewright.base import environment
from tilewright.base.private_files import PrivateFolder, UnsafeFile, cache_root, say_once
from tilewright.frontend.zyn.shipped_tables import shipped

MAKING = {"parser": "lalr", "lexer": "basic", "keep_all_tokens": True, "maybe_placeholders": False}


def make_parser(grammar: str, layout: object, builder: object) -> lark.Lark:
    """The parser, from the package's tables or kept ones where there are some."""
    data = shipped(grammar, lark.__version__, MAKING)
    path = _place(grammar) if data is None else None
    if path is not None:
        data = _read(path)
    if data is not None:
        parser: lark.Lark = lark.Lark.__new__(lark.Lark)
        return parser._load(data, postlex=layout, transformer=builder)
    parser = lark.Lark(grammar, postlex=layout, transformer=builder, **MAKING)
    if path is not None:
        _write(path, parser)
    return parser


def made_tables(grammar: str, layout: object, builder: object) -> dict[str, object]:
    """The tables, made anew, as lark saves them."""
    buffer = io.BytesIO()
    lark.Lark(grammar, postlex=layout, transformer=builder, **MAKING).save(buffer, ("postlex", "transformer"))
    tables: dict[str, object] = pickle.loads(buffer.getvalue())
    return tables


def _place(grammar: str) -> Path | None:
    if not environment.is_on("TILEWRIGHT_CACHE"):
        return None
    try:
        root = cache_root()
    except RuntimeError:  # no home directory
        return None
    depends = repr((grammar, lark.__version__, sys.version_info[:2], sorted(MAKING.items())))
    return root / "grammar" / f"{hashlib.sha256(depends.encode()).hexdigest()[:32]}.tables"


def _read(path: Path) -> dict[str, object] | None:
    """Kept tables. A digest stands before them: a file that was cut short is no tables."""
    try:
        content = PrivateFolder(path.parent).read(path.name)
    except UnsafeFile as problem:
        # A pickle is as good as code.
        say_once(f"the tables of the parser in {path.parent} are not used: {problem}")
        return None
    except OSError:
        return None
    digest, body = content[:32], content[32:]
    if hashlib.sha256(body).digest() != digest:
        return None
    tables: dict[str, object] = pickle.loads(body)
    return tables


def _write(path: Path, parser: lark.Lark) -> None:
    """Keep tables, all of them or none; a directory that cannot be written to is nobody's error."""
    buffer = io.BytesIO()
    parser.save(buffer, ("postlex", "transformer"))
    folder = PrivateFolder(path.parent)
    try:
        folder.make()
        folder.write(path.name, hashlib.sha256(buffer.getvalue()).digest() + buffer.getvalue())
    except UnsafeFile as problem:
        say_once(f"the tables of the parser in {path.parent} are not used: {problem}")
    except OSError:
        return
