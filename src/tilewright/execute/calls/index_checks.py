"""Whether indices are checked as kernels run: what a kernel says, and what the environment says for the whole process."""

from __future__ import annotations

import functools
import os

from tilewright.base.errors import UserError

VARIABLE = "TILEWRIGHT_CHECK"


@functools.cache
def all_checked() -> bool:
    """Whether the environment asks for checks of every kernel on every device, also of those that say `unchecked`. Raises UserError."""
    asked = os.environ.get(VARIABLE, "")
    if asked in ("", "0"):
        return False
    if asked != "1":
        raise UserError.at("TW016", f"{VARIABLE} is {asked!r}", help="set it to 1 to check all indices, or to 0")
    return True


def check_flags(unchecked: object, check: object) -> None:
    """Refuse values of the two options that are no truth values, and both at once."""
    for name, value in (("unchecked", unchecked), ("check", check)):
        if not isinstance(value, bool):
            raise UserError.at("TW009", f"{name} is {value!r}", help="give True or False")
    if unchecked and check:
        raise UserError.at("TW016", "a kernel is both unchecked=True and check=True", help="leave one of them out")
