"""Arguments that are only described: `kernel.compile("f32[64,*,128]", 2)` needs no array.

In: what a call of `compile`, `stages` or `export` was given. Out: the same with a stand-in for each text: an array of that dtype and shape, whose
elements nobody reads. `*` is any size: an extent that promises no divisor.
"""

from __future__ import annotations

import re

import numpy as np

from tilewright.base import dtypes
from tilewright.base.errors import UserError

_ANY = 1021
"""A prime: code that is made for it counts on nothing."""
_FORM = re.compile(r"\s*([A-Za-z_]\w*)\s*(?:\[([^\]]*)\])?\s*")


def stand_in(value: object) -> object:
    """The value itself, or the array or number that a text describes."""
    if not isinstance(value, str):
        return value
    found = _FORM.fullmatch(value)
    if found is None or not dtypes.is_name(found[1]):
        raise UserError.at("TW009", f"{value!r} describes no argument", help="write for example 'f32[64,*,128]', 'i32' or 'float', or give a value")
    if found[2] is None:
        plain = {"float": 0.5, "int": 1, "bool": True}
        return plain[found[1]] if found[1] in plain else dtypes.by_name(found[1]).numpy.type(1)
    parts = [part.strip() for part in found[2].split(",")] if found[2].strip() else []
    wrong = [part for part in parts if part != "*" and not part.isdigit()]
    if wrong:
        raise UserError.at("TW009", f"'{wrong[0]}' is no extent in {value!r}", help="write a number, or * for any size")
    return np.empty([_ANY if part == "*" else int(part) for part in parts], dtypes.by_name(found[1]).numpy)
