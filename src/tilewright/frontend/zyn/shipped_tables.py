"""The tables of the parser that come with the package, as text.

In: tables as lark saves them, or the text of `zyn.tables.json`. Out: the other of the two. States and tokens are numbered in one order, whatever order lark
found them in: the same grammar gives the same text. The text names the grammar and the version of lark it was made with, and serves no other.
`tools/parser_tables.py --write` makes it anew.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from typing import Any

NAME = "zyn.tables.json"
_SHIFT, _REDUCE = 0, 1


def shipped(grammar: str, version: str, making: dict[str, Any]) -> dict[str, Any] | None:
    """The tables in the package, as lark loads them; None where they are of another grammar, other options or another lark."""
    try:
        text = packaged(NAME)
    except OSError:
        return None
    return decoded(text, grammar, version, making)


def packaged(name: str) -> str:
    """The text of a file beside this module, wherever the package lies: in a folder or in an archive. `importlib.resources` does the same, and takes some
    milliseconds to load."""
    assert __spec__ is not None
    data: bytes = __spec__.loader.get_data(os.path.join(os.path.dirname(__file__), name))  # type: ignore[union-attr]
    return data.decode("utf-8").replace("\r\n", "\n")


def encoded(tables: dict[str, Any], grammar: str, version: str, making: dict[str, Any]) -> str:
    """The text of tables: a head that says what they were made of, and what follows from it, one state a line."""
    parser = tables["data"]["parser"]["parser"]
    names: dict[int, str] = parser["tokens"]
    token_number = {name: number for number, name in enumerate(sorted(names.values()))}
    states = {
        state: sorted(((token_number[names[token]], action, argument) for token, (action, argument) in row.items()), key=lambda entry: entry[0])
        for state, row in parser["states"].items()
    }
    order = _reached(states, parser["start_states"])
    rows = []
    for state in order:
        row: list[int] = []
        for token, action, argument in states[state]:
            row += [token, order[argument] if action == _SHIFT else ~argument["@"]]
        rows.append(row)
    ends = ("start_states", "end_states")
    rest = {
        "data": {**tables["data"], "parser": {**tables["data"]["parser"], "parser": None}},
        "memo": [tables["memo"][number] for number in range(len(tables["memo"]))],
        "tokens": sorted(names.values()),
        **{end: {start: order[state] for start, state in parser[end].items()} for end in ends},
    }
    lines = [json.dumps({"made_of": _made_of(grammar, version, making)})[:-1]]
    lines += [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in rest.items()]
    return ",\n".join([*lines, '"states": [\n' + ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows) + "\n]}"]) + "\n"


def decoded(text: str, grammar: str, version: str, making: dict[str, Any]) -> dict[str, Any] | None:
    """The tables of a text; None where the text was made of something else."""
    kept = json.loads(text)
    if kept["made_of"] != _made_of(grammar, version, making):
        return None
    reduce_by = [(_REDUCE, {"@": number}) for number in range(len(kept["memo"]))]
    states = {}
    for state, row in enumerate(kept["states"]):
        entries = iter(row)
        states[state] = {token: (_SHIFT, entry) if entry >= 0 else reduce_by[~entry] for token, entry in zip(entries, entries, strict=True)}
    for item in kept["memo"]:
        if "options" in item:
            item["options"]["empty_indices"] = tuple(item["options"]["empty_indices"])
    kept["data"]["parser"]["parser"] = {
        "tokens": dict(enumerate(kept["tokens"])), "states": states, "start_states": kept["start_states"], "end_states": kept["end_states"],
    }  # fmt: skip
    return {"data": kept["data"], "memo": dict(enumerate(kept["memo"]))}


def _made_of(grammar: str, version: str, making: dict[str, Any]) -> dict[str, Any]:
    return {"grammar": hashlib.sha256(grammar.encode()).hexdigest(), "lark": version, "options": making}


def _reached(states: dict[int, list[tuple[int, int, Any]]], starts: dict[str, int]) -> dict[int, int]:
    """Every state's number in the order in which they are reached from the start."""
    found: dict[int, int] = {}
    waiting = deque(state for _, state in sorted(starts.items()))
    while waiting:
        state = waiting.popleft()
        if state in found:
            continue
        found[state] = len(found)
        waiting.extend(argument for _, action, argument in states[state] if action == _SHIFT)
    assert len(found) == len(states), "a state that no text reaches"
    return found
