"""Byte-pair encoding over bytes, as GGUF files have it under the name `gpt2`.

In: a text; out: ids. A rule splits the text into words; the bytes of a word are written as printable characters, a space as `Ġ`; pairs of
them are merged in the order of the file's list. Words come again, so their ids are remembered.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from tilewright.base.errors import UserError
from tilewright.models.tokenizers.base import Tokenizer, checked_text
from tilewright.models.tokenizers.merging import merge_pairs
from tilewright.models.tokenizers.pretokens import split_rule
from tilewright.models.tokenizers.special import SpecialTokens
from tilewright.models.tokenizers.vocabulary import BYTE, CONTROL, UNKNOWN, USER_DEFINED, Vocabulary

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


class BytePairTokenizer(Tokenizer):
    """Merges in the order of a list, over bytes."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        rule = metadata.get("tokenizer.ggml.pre")
        self._rule = split_rule(None if rule is None else str(rule))
        self._vocabulary = vocabulary = Vocabulary(metadata, {"add_bos_token": self._rule.add_bos})
        self.bos, self.eos, self.eot = vocabulary.id("bos_token_id"), vocabulary.id("eos_token_id"), vocabulary.ends
        self.chat_template, self.vocabulary_size = vocabulary.chat_template, vocabulary.size
        self._unknown = vocabulary.id("unknown_token_id")
        self._add_bos, self._add_eos = vocabulary.flag("add_bos_token"), vocabulary.flag("add_eos_token")
        self._ids = vocabulary.ids
        merges = vocabulary.merges
        # Of equal merges the first counts. No piece of a word holds a space, so 'left right' is a key.
        self._ranks = dict(zip(reversed(merges), range(len(merges) - 1, -1, -1)))
        self._known: dict[str, list[int]] = {}

    # -- to ids -------------------------------------------------------------------------------------------------------

    def encode(self, text: str, *, add_bos: bool | None = None, special: bool = False) -> list[int]:
        around = self._add_bos if add_bos is None else add_bos
        found = [self.bos] if around and self.bos is not None else []
        known = self._known
        for part in (self._named if special else self._user_defined).split(checked_text(text)):
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
        if self._add_eos and add_bos is not False and self.eos is not None:
            found.append(self.eos)
        return found

    @cached_property
    def _named(self) -> SpecialTokens:
        """All tokens that texts may name."""
        tokens = self._vocabulary.tokens
        return SpecialTokens((tokens[id], id) for id in self._vocabulary.special)

    @cached_property
    def _user_defined(self) -> SpecialTokens:
        tokens, types = self._vocabulary.tokens, self._vocabulary.types
        return SpecialTokens((tokens[id], id) for id in self._vocabulary.special if types[id] == USER_DEFINED)

    def _merge(self, word: str) -> list[int]:
        ids, ranks = self._ids, self._ranks
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
        id = self._ids.get(character, self._unknown)
        if id is None:
            raise UserError.at("TW007", f"the tokenizer has no token for byte {_BYTES[character]:#04x}, and none for what is unknown")
        return id

    # -- to text ------------------------------------------------------------------------------------------------------

    def piece(self, id: int, *, special: bool = False) -> bytes:
        kind = self._vocabulary.types[self.checked(id)]
        token = self._vocabulary.tokens[id]
        if kind in (CONTROL, UNKNOWN):
            return token.encode("utf-8") if special else b""
        if kind in (USER_DEFINED, BYTE):
            return token.encode("utf-8")
        return b"".join(bytes([_BYTES[character]]) if character in _BYTES else character.encode("utf-8") for character in token)

    def token(self, id: int) -> str:
        return self._vocabulary.tokens[self.checked(id)]

    def id_of(self, token: str) -> int | None:
        return self._ids.get(token)
