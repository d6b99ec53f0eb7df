"""The words of the kernel languages as Python objects. In: rows and classes. Out: for a name, what `tilewright.name` is.

A word that is a function is made from its row when somebody asks for it: with its signature and documentation, so that `help`
shows them. Calling it outside of a kernel is an error that says so.
"""

from __future__ import annotations

import functools
from types import FunctionType

from tilewright.base.dtypes import f32
from tilewright.base.errors import public
from tilewright.frontend.words import objects
from tilewright.frontend.words.rows import KERNEL, WORDS, WordRow

NAMES = frozenset((*objects.OBJECTS, *(row.name for row in WORDS.values() if row.offered)))
"""All that `tilewright` offers of the kernel languages."""


@functools.cache
def python_word(name: str) -> object:
    """The Python object of a word in `NAMES`."""
    return getattr(objects, name) if name in objects.OBJECTS else _function(WORDS[name])


def _function(row: WordRow) -> object:
    """A function with the row's signature that refuses to be called."""
    namespace: dict[str, object] = {"__name__": "tilewright", "f32": f32, "refuse": objects.refuse}
    explicit = not row.kinds & KERNEL
    text = f"from __future__ import annotations\ndef {row.name}{row.signature}: refuse({row.name!r}, {explicit})"
    exec(compile(text, __file__, "exec"), namespace)
    function = namespace[row.name]
    assert isinstance(function, FunctionType)
    function.__doc__ = row.doc
    return public(function)
