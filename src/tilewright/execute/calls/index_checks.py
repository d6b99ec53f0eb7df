"""Whether indices are checked as kernels run: what a kernel says, and what the environment says for the whole process."""

from __future__ import annotations

import functools

from tilewright.base import environment
from tilewright.base.errors import UserError

VARIABLE = "TILEWRIGHT_CHECK"


@functools.cache
def all_checked() -> bool:
    """Whether the environment asks for checks of every kernel on every device, also of those that say `unchecked`. Raises UserError."""
    return environment.is_on(VARIABLE)


def check_flags(unchecked: object, check: object) -> None:
    """Refuse values of the two options that are no truth values, and both at once."""
    for name, value in (("unchecked", unchecked), ("check", check)):
        if not isinstance(value, bool):
            raise UserError.at("TW009", f"{name} is {value!r}", help="give True or False")
    if unchecked and check:
        raise UserError.at("TW016", "a kernel is both unchecked=True and check=True", help="leave one of them out")
