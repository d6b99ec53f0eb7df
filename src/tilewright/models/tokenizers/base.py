"""What every tokenizer offers: text to ids and back, the ids that begin and end a text, the chat template."""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

from tilewright.base.errors import UserError


class Tokenizer(ABC):
    """Text to ids and back. `bos` and `eos` begin and end a text, None where there is none; `eot` are all ids at which generation stops."""

    bos: int | None
    eos: int | None
    eot: frozenset[int]
    chat_template: str | None
    vocabulary_size: int

    @abstractmethod
    def encode(self, text: str, *, add_bos: bool | None = None, special: bool = False) -> list[int]:
        """The ids of a text. `add_bos` puts the ids around it that the model wants, by default as its file says. With `special` the names of
        control tokens in the text become their ids, as rendered chat templates need it; else they are text like any other."""

    @abstractmethod
    def piece(self, id: int, *, special: bool = False) -> bytes:
        """The bytes that an id stands for. Control tokens have none without `special`."""

    @abstractmethod
    def token(self, id: int) -> str:
        """A token as the file has it."""

    @abstractmethod
    def id_of(self, token: str) -> int | None:
        """The id of a token as the file has it; None if there is none."""

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """The text of ids. Bytes that are not UTF-8 become U+FFFD."""
        return b"".join([self.piece(id, special=special) for id in ids]).decode("utf-8", "replace")

    def pieces(self, ids: Iterable[int], *, special: bool = False) -> Iterator[str]:
        """The text of each id as it comes, in whole characters: '' while one is incomplete. What is left at the end comes last."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for id in ids:
            yield decoder.decode(self.piece(id, special=special))
        if rest := decoder.decode(b"", final=True):
            yield rest

    def checked(self, id: int) -> int:
        """An id that there is. Raises `UserError`."""
        if not 0 <= id < self.vocabulary_size:
            raise UserError.at("TW013", f"there is no token {id}: the vocabulary has {self.vocabulary_size}")
        return int(id)


def checked_text(text: object) -> str:
    """A text that has a form in UTF-8. Raises `UserError`."""
    if not isinstance(text, str):
        raise UserError.at("TW009", f"a text is a str, got a {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError.at("TW009", f"the text has half of a surrogate pair at {error.start}, which has no form in UTF-8") from None
    return text
