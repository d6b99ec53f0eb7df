"""Tokenizers of SentencePiece's kind, as GGUF files have them under the name `llama`.

In: a text whose spaces are `▁`. Out: ids. Characters are merged pair by pair, always the pair whose token has the best score, the leftmost of
equal ones; characters without a token become tokens of their bytes, `<0x41>`. Merges never cross two characters that no token has side by
side, so long texts are cut there, and what is between is remembered: words come again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from tilewright.base.errors import UserError
from tilewright.models.tokenizers.gguf_tokenizer import GGUFTokenizer
from tilewright.models.tokenizers.merging import merge_pairs
from tilewright.models.tokenizers.vocabulary import BYTE, CONTROL, UNKNOWN, USER_DEFINED

SPACE = "▁"
_SHORT = 200
"""Characters that are merged as they are: cutting costs more."""
_LONG = 2000
"""Characters without a space from which on all pairs of the vocabulary are looked at."""
_MOST_KEPT = 1 << 16
"""Words that are remembered."""
_LONGEST_KEPT = 256
"""Characters of words that are."""
_DEFAULTS: dict[str, int | bool] = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "add_bos_token": True, "add_eos_token": False, "add_space_prefix": True}


class SentencePieceTokenizer(GGUFTokenizer):
    """Merges by score, with tokens of bytes for what has none."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        super().__init__(metadata, _DEFAULTS)
        self._prefix = self.vocabulary.flag("add_space_prefix")
        self._scores = self.vocabulary.scores
        self._known: dict[str, list[int]] = {}

    # -- to ids -------------------------------------------------------------------------------------------------------

    def encode(self, text: str, *, add_bos: bool | None = None, special: bool = False) -> list[int]:
        found = self.ids_before(add_bos)
        after_special = True
        for part in self.parts(text, special):
            if isinstance(part, int):
                found.append(part)
                after_special = True
            else:
                self._encode((" " + part if self._prefix and after_special else part).replace(" ", SPACE), found)
                after_special = False
        return found + self.ids_behind(add_bos)

    def _encode(self, text: str, found: list[int]) -> None:
        if len(text) <= _SHORT:
            found += self._merge(text)
            return
        known = self._known
        for word in self._words.split(text):
            ids = known.get(word)
            if ids is None:
                ids = self._merge(word) if len(word) < _LONG else self._merge_long(word)
                if len(word) <= _LONGEST_KEPT:
                    if len(known) >= _MOST_KEPT:
                        known.clear()
                    known[word] = ids
            found += ids

    @cached_property
    def _words(self) -> re.Pattern[str]:
        """Where a text is cut: before spaces, but not after characters that some token has before one."""
        ends = {part[-1] for part in "\0".join(self.vocabulary.tokens).split(SPACE) if part} | {"\0", SPACE}
        return re.compile(f"(?={SPACE})(?<=[^{''.join(map(re.escape, sorted(ends)))}])")

    def _merge_long(self, text: str) -> list[int]:
        """The ids of a long text without spaces, cut between characters that are side by side in no token."""
        points = np.frombuffer(text.encode("utf-32-le"), np.uint32).astype(np.int64)
        pairs = points[:-1] << 21 | points[1:]
        places = np.searchsorted(self._pairs, pairs)
        apart = self._pairs[np.minimum(places, len(self._pairs) - 1)] != pairs
        cuts = [0, *(np.flatnonzero(apart) + 1).tolist(), len(text)]
        found: list[int] = []
        for begin, end in pairwise(cuts):
            found += self._merge(text[begin:end])
        return found

    @cached_property
    def _pairs(self) -> np.ndarray:
        """All pairs of characters that stand side by side in a token, sorted."""
        points = np.frombuffer("\0".join(self.vocabulary.tokens).encode("utf-32-le"), np.uint32).astype(np.int64)
        pairs = np.unique(points[:-1] << 21 | points[1:])
        return pairs if len(pairs) else np.zeros(1, np.int64)

    def _merge(self, text: str) -> list[int]:
        """The ids of a text, merged as a whole."""
        ids, scores = self.ids, self._scores

        def rank(left: str, right: str) -> float | None:
            id = ids.get(left + right)
            return None if id is None else -scores[id]

        found: list[int] = []
        for symbol in merge_pairs(text, rank):
            if (id := ids.get(symbol)) is not None:
                found.append(id)
            else:
                found += self._bytes(symbol)
        return found

    def _bytes(self, character: str) -> list[int]:
        """A character without a token: those of its bytes, or the unknown token."""
        found = []
        for byte in character.encode("utf-8"):
            id = self.ids.get(f"<0x{byte:02X}>")
            if id is None:
                if self.unknown is None:
                    raise UserError.at("TW007", f"the tokenizer has no token for byte {byte:#04x} of {character!r}, and none for what is unknown")
                return [self.unknown]
            found.append(id)
        return found

    # -- to text ------------------------------------------------------------------------------------------------------

    def piece(self, id: int, *, special: bool = False) -> bytes:
        kind = self.vocabulary.types[self.checked(id)]
        token = self.vocabulary.tokens[id]
        if kind in (CONTROL, UNKNOWN):
            return token.encode("utf-8") if special else b""
        if kind == BYTE and re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token):
            return bytes([int(token[3:5], 16)])
        return token.encode("utf-8") if kind == USER_DEFINED else token.replace(SPACE, " ").encode("utf-8")

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """The text of ids, without the space that `encode` puts before a text."""
        text = super().decode(ids, special=special)
        return text[1:] if self._prefix and text.startswith(" ") else text
