"""WordPiece, as GGUF files have it under the name `bert`.

In: a text; out: ids. The text is cleaned (control characters go; letters become lower case and lose their accents where the file says so),
then cut at spaces, around punctuation and around Chinese characters. A word is covered from the left by the longest tokens that fit; one that
cannot be covered is the unknown token. In GGUF a token that begins a word has `▁` before it, others have none.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tilewright.models.tokenizers.gguf_tokenizer import GGUFTokenizer
from tilewright.models.tokenizers.vocabulary import CONTROL, UNKNOWN, USER_DEFINED

SPACE = "▁"
_LONGEST_WORD = 100
"""Characters of a word; longer ones are unknown, as in the models' own tokenizers."""
_DEFAULTS: dict[str, int | bool] = {
    "bos_token_id": 101, "seperator_token_id": 102, "unknown_token_id": 100, "add_bos_token": True, "normalizer.lowercase": True,
}  # fmt: skip
_CHINESE = (
    (0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F), (0x2B740, 0x2B81F), (0x2B920, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F),
)  # fmt: skip
"""Ranges as the tokenizers of the models have them."""


def _is_chinese(point: int) -> bool:
    return point >= 0x3400 and any(first <= point <= last for first, last in _CHINESE)


class WordPieceTokenizer(GGUFTokenizer):
    """The longest tokens that fit, word by word."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        super().__init__(metadata, _DEFAULTS)
        vocabulary = self.vocabulary
        # Some files have a name of their own for the token that begins a text.
        first = vocabulary.id("cls_token_id")
        self.bos = first if first is not None and not vocabulary.has("bos_token_id") else self.bos
        self._separator = vocabulary.id("seperator_token_id")
        self._lower = vocabulary.flag("normalizer.lowercase")
        self._strip = vocabulary.flag("normalizer.strip_accents") if vocabulary.has("normalizer.strip_accents") else self._lower
        self._longest = max(map(len, vocabulary.tokens))

    def encode(self, text: str, *, add_bos: bool | None = None, special: bool = False) -> list[int]:
        found = self.ids_before(add_bos)
        for part in self.parts(text, special):
            if isinstance(part, int):
                found.append(part)
            else:
                for word in self._words(part):
                    found += self._cover(word)
        if self._separator is not None and (self.add_bos if add_bos is None else add_bos):
            found.append(self._separator)
        return found

    def _words(self, text: str) -> Iterator[str]:
        cleaned = "".join(" " if character.isspace() and character not in "\x1c\x1d\x1e\x1f" else character for character in text if not _is_dropped(character))
        if self._strip:
            cleaned = "".join(character for character in unicodedata.normalize("NFD", cleaned) if unicodedata.category(character) != "Mn")
        if self._lower:
            # One character at a time: at the end of a word, sigma stays as it is.
            cleaned = "".join(map(str.lower, cleaned))
        word = ""
        for character in cleaned:
            if character == " " or character.isspace():
                if word:
                    yield word
                word = ""
            elif _is_chinese(ord(character)) or _is_punctuation(character):
                if word:
                    yield word
                yield character
                word = ""
            else:
                word += character
        if word:
            yield word

    def _cover(self, word: str) -> list[int]:
        unknown = [self.unknown] if self.unknown is not None else []
        if len(word) > _LONGEST_WORD:
            return unknown
        found: list[int] = []
        rest = SPACE + word
        while rest:
            for length in range(min(len(rest), self._longest), 0, -1):
                id = self.ids.get(rest[:length])
                # Tokens with the mark of a beginning begin words, and the mark alone covers nothing.
                if id is not None and rest[:length] != SPACE and (not found or rest[0] != SPACE):
                    found.append(id)
                    rest = rest[length:]
                    break
            else:
                return unknown
        return found

    # -- to text ------------------------------------------------------------------------------------------------------

    def piece(self, id: int, *, special: bool = False) -> bytes:
        kind = self.vocabulary.types[self.checked(id)]
        token = self.vocabulary.tokens[id]
        if kind in (CONTROL, UNKNOWN) and not special:
            return b""
        return (token if kind == USER_DEFINED else token.replace(SPACE, " ")).encode("utf-8")

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """The words of ids, with spaces between them; those that were dropped or made lower case stay so."""
        return super().decode(ids, special=special).removeprefix(" ")


def _is_dropped(character: str) -> bool:
    """Control characters and the like, but those that are spaces."""
    return character in "\0\ufffd" or (character not in "\t\n\r" and unicodedata.category(character) in ("Cc", "Cf", "Cn", "Co"))


def _is_punctuation(character: str) -> bool:
    return (character.isascii() and not character.isalnum() and character > " ") or unicodedata.category(character).startswith("P")
