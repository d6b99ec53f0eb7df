"""The loop of the parser, over lark's own tables.

In: a `lark.Lark` with its tables, its lexer and the callbacks of its rules; a text. Out: what the callbacks make of the text, the same as
`Lark.parse` gives. A text that is not ZynML ends in `NotParsed`: `Lark.parse` then says what is wrong with it.

Half of an expression's rules only pass one part on (a number is a power, a product, a sum…). A run of them depends on two states and the
token that follows, so that each run is looked up as one step after the first time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lark
from lark.parse_tree_builder import ExpandSingleChild
from lark.parsers.lalr_analysis import Shift

_END = "$END"
Callback = Callable[[Any], Any]
_Reduction = tuple[int, Callback, str, bool]
"""How many parts a rule has, what makes something of them, the rule's name, and whether it only passes its part on."""


class NotParsed(Exception):
    """The text breaks the grammar somewhere."""


class QuickParser:
    """One parser's tables, in the form the loop wants them."""

    def __init__(self, parser: lark.Lark) -> None:
        self._frontend: Any = parser.parser
        inner = self._frontend.parser.parser
        (start,) = parser.options.start
        self._first, self._last = inner.parse_table.start_states[start], inner.parse_table.end_states[start]
        self._terminals: dict[str, Callback] = {name: made for name, made in inner.callbacks.items() if isinstance(name, str)}
        self._shifts: dict[int, dict[str, int]] = {}
        """By state and what follows: the next state."""
        self._reductions: dict[int, dict[str, _Reduction]] = {}
        """By state and the token that follows: the rule that is complete."""
        rules: dict[int, _Reduction] = {}
        for state, actions in inner.parse_table.states.items():
            shifts, reductions = self._shifts.setdefault(state, {}), self._reductions.setdefault(state, {})
            for kind, (action, argument) in actions.items():
                if action is Shift:
                    shifts[kind] = argument
                    continue
                if id(argument) not in rules:
                    callback, size = inner.callbacks[argument], len(argument.expansion)
                    rules[id(argument)] = size, callback, argument.origin.name, size == 1 and isinstance(callback, ExpandSingleChild)
                reductions[kind] = rules[id(argument)]
        self._passed: dict[tuple[int, int, str], int] = {}
        """By the state below, the state and the token that follows: where a run of rules that pass a part on ends."""

    def parse(self, text: str) -> Any:
        """What the callback of the first rule makes of the text. Raises `NotParsed` and what lexer, layout and callbacks raise."""
        shifts, passed, terminals = self._shifts, self._passed, self._terminals
        states, values = [self._first], []
        for token in self._frontend._make_lexer_thread(text).lex(None):
            kind = token.type
            while True:
                state = states[-1]
                following = shifts[state].get(kind)
                if following is not None:
                    states.append(following)
                    values.append(terminals[kind](token) if kind in terminals else token)
                    break
                end = passed.get((states[-2], state, kind)) if values else None
                if end is None:
                    self._reduce(states, values, kind)
                else:
                    states[-1] = end
        while states[-1] != self._last:
            self._reduce(states, values, _END)
        return values[-1]

    def _reduce(self, states: list[int], values: list[Any], kind: str) -> None:
        """One rule that is complete, or a run of those that pass a part on."""
        state = states[-1]
        rule = self._reductions[state].get(kind)
        if rule is None:
            raise NotParsed
        size, callback, name, passes = rule
        if passes:
            below = states[-2]
            end = state
            while rule is not None and rule[3] and end != self._last:
                end = self._shifts[below][rule[2]]
                rule = self._reductions[end].get(kind)
            self._passed[below, state, kind] = states[-1] = end
            return
        parts: list[Any] = []
        if size:
            parts = values[-size:]
            del states[-size:], values[-size:]
        values.append(callback(parts))
        states.append(self._shifts[states[-1]][name])
