"""Names of special tokens in a text. In: a text; out: its parts, texts and ids in turn.

As llama.cpp does it: the longest token first, each cut out of all texts that are left wherever it stands, from the left.
"""

from __future__ import annotations

import re
from collections.abc import Iterable


class SpecialTokens:
    """Tokens that are looked for, each with its id, the most important first."""

    def __init__(self, tokens: Iterable[tuple[str, int]]) -> None:
        self._rank: dict[str, int] = {}
        self._ids: list[int] = []
        lengths: dict[str, set[int]] = {}
        for token, id in tokens:
            if token not in self._rank:
                self._rank[token] = len(self._ids)
                self._ids.append(id)
                lengths.setdefault(token[0], set()).add(len(token))
        self._lengths = {first: sorted(some) for first, some in lengths.items()}
        self._first = re.compile("[" + "".join(map(re.escape, lengths)) + "]") if lengths else None

    def split(self, text: str) -> list[str | int]:
        """The text in parts: strings, none of them empty, and ids."""
        if not text or self._first is None:
            return [text] if text else []
        present: set[str] = set()
        for match in self._first.finditer(text):
            at = match.start()
            for length in self._lengths[match[0]]:
                if (found := text[at : at + length]) in self._rank:
                    present.add(found)
        parts: list[str | int] = [text]
        for token in sorted(present, key=self._rank.__getitem__):
            id = self._ids[self._rank[token]]
            cut: list[str | int] = []
            for part in parts:
                if isinstance(part, int) or token not in part:
                    cut.append(part)
                    continue
                first, *others = part.split(token)
                cut += [first] if first else []
                for other in others:
                    cut += [id, other] if other else [id]
            parts = cut
        return parts
