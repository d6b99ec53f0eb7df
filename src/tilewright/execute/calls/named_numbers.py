"""Numbers that came into a graph under a name. In: a number; out: one that is equal to it and knows its name.

A kernel that takes such a number inside a capture tells the recorder, so that the graph can be given another one later.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.runtime.core import streams


class _NamedFloat(float):
    name = ""


class _NamedInt(int):
    name = ""


def named(value: float, name: str) -> float:
    """The number with a name; a whole one stays whole."""
    made = _NamedFloat(value) if isinstance(value, float) else _NamedInt(value)
    made.name = name
    return made


def tell_recorder(parameters: tuple[str, ...], args: tuple[object, ...], keywords: Mapping[str, object]) -> None:
    """Say which numbers of the call that follows on this thread have a name."""
    given = {**dict(zip(parameters, args, strict=False)), **keywords}
    names = {parameter: value.name for parameter, value in given.items() if isinstance(value, _NamedFloat | _NamedInt)}
    host = streams.host_recorder()
    if host is not None:
        host.names = names
    for recorder in set(streams.recorders.values()):
        if recorder.thread_is_mine():
            recorder.names = names
