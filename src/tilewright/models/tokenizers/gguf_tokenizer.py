"""What the tokenizers of GGUF files share: the vocabulary, special ids, and texts cut at special tokens."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from tilewright.models.tokenizers.base import Tokenizer, checked_text
from tilewright.models.tokenizers.special import SpecialTokens
from tilewright.models.tokenizers.vocabulary import USER_DEFINED, Vocabulary


class GGUFTokenizer(Tokenizer):
    """A tokenizer whose vocabulary is in metadata; `defaults` are what files leave out."""

    def __init__(self, metadata: Mapping[str, Any], defaults: Mapping[str, int | bool]) -> None:
        self.vocabulary = vocabulary = Vocabulary(metadata, defaults)
        self.bos, self.eos, self.eot = vocabulary.id("bos_token_id"), vocabulary.id("eos_token_id"), vocabulary.ends
        self.chat_template, self.vocabulary_size = vocabulary.chat_template, vocabulary.size
        self.unknown = vocabulary.id("unknown_token_id")
        self.add_bos, self.add_eos = vocabulary.flag("add_bos_token"), vocabulary.flag("add_eos_token")
        self.ids = vocabulary.ids

    def parts(self, text: str, special: bool) -> list[str | int]:
        """A text cut at the names of special tokens: user-defined ones always, all others with `special`."""
        return (self._named if special else self._user_defined).split(checked_text(text))

    def ids_before(self, add_bos: bool | None) -> list[int]:
        """What begins a text."""
        return [self.bos] if self.bos is not None and (self.add_bos if add_bos is None else add_bos) else []

    def ids_behind(self, add_bos: bool | None) -> list[int]:
        """What ends a text."""
        return [self.eos] if self.eos is not None and self.add_eos and add_bos is not False else []

    @cached_property
    def _named(self) -> SpecialTokens:
        """All tokens that texts may name."""
        tokens = self.vocabulary.tokens
        return SpecialTokens((tokens[id], id) for id in self.vocabulary.special)

    @cached_property
    def _user_defined(self) -> SpecialTokens:
        tokens, types = self.vocabulary.tokens, self.vocabulary.types
        return SpecialTokens((tokens[id], id) for id in self.vocabulary.special if types[id] == USER_DEFINED)

    def token(self, id: int) -> str:
        return self.vocabulary.tokens[self.checked(id)]

    def id_of(self, token: str) -> int | None:
        return self.ids.get(token)
