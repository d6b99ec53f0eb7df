"""Byte-pair encoding over bytes, as GGUF files have it under the name `gpt2`.

In: a text; out: ids. A rule splits the text into words; the bytes of a word are written as printable characters, a space as `Ġ`; pairs of
them are merged in the order of the file's list. Words come again, so their ids are remembered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewright.base.errors import UserError
from tilewright.models.tokenizers.gguf_tokenizer import GGUFTokenizer
from tilewright.models.tokenizers.merging import merge_pairs
from tilewright.models.tokenizers.pretokens import split_rule
from tilewright.models.tokenizers.vocabulary import BYTE, CONTROL, UNKNOWN, USER_DEFINED

_MOST_KEPT = 1 << 16
"""Words that are remembered."""
_LONGEST_KEPT = 256
"""Characters of words that are."""


def _printable() -> dict[int, int]:
    """Bytes to the characters that stand for them: themselves where they are printable, else those from 256 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {byte: byte for byte in plain} | {byte: 256 + place for place, byte in enumerate(others)}


_CHARACTERS = _printable()
_BYTES = {chr(character): byte for byte, character in _CHARACTERS.items()}


class BytePairTokenizer(GGUFTokenizer):
    """Merges in the order of a list, over bytes."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        rule = metadata.get("tokenizer.ggml.pre")
        self._rule = split_rule(None if rule is None else str(rule))
        super().__init__(metadata, {"add_bos_token": self._rule.add_bos})
        merges = self.vocabulary.merges
        # Of equal merges the first counts. No piece of a word holds a space, so 'left right' is a key.
        self._ranks = dict(zip(reversed(merges), range(len(merges) - 1, -1, -1)))
        self._known: dict[str, list[int]] = {}

    # -- to ids -------------------------------------------------------------------------------------------------------

    def encode(self, text: str, *, add_bos: bool | None = None, special: bool = False) -> list[int]:
        found = self.ids_before(add_bos)
        known = self._known
        for part in self.parts(text, special):
            if isinstance(part, int):
                found.append(part)
                continue
            for word in self._rule.words(part):
                ids = known.get(word)
                if ids is None:
                    ids = self._merge(word)
                    if len(word) <= _LONGEST_KEPT:
                        if len(known) >= _MOST_KEPT:
                            known.clear()
                        known[word] = ids
                found += ids
        return found + self.ids_behind(add_bos)

    def _merge(self, word: str) -> list[int]:
        ids, ranks = self.ids, self._ranks
        characters = word.encode("utf-8").decode("latin-1").translate(_CHARACTERS)
        if self._rule.whole_words and (id := ids.get(characters)) is not None:
            return [id]
        found: list[int] = []
        for symbol in merge_pairs(characters, lambda left, right: ranks.get(f"{left} {right}")):
            if (id := ids.get(symbol)) is not None:
                found.append(id)
            else:
                found += [self._character(character) for character in symbol]
        return found

    def _character(self, character: str) -> int:
        id = self.ids.get(character, self.unknown)
        if id is None:
            raise UserError.at("TW007", f"the tokenizer has no token for byte {_BYTES[character]:#04x}, and none for what is unknown")
        return id

    # -- to text ------------------------------------------------------------------------------------------------------

    def piece(self, id: int, *, special: bool = False) -> bytes:
        kind = self.vocabulary.types[self.checked(id)]
        token = self.vocabulary.tokens[id]
        if kind in (CONTROL, UNKNOWN):
            return token.encode("utf-8") if special else b""
        if kind in (USER_DEFINED, BYTE):
            return token.encode("utf-8")
        return b"".join(bytes([_BYTES[character]]) if character in _BYTES else character.encode("utf-8") for character in token)
