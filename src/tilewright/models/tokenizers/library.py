"""Tokenizers of `tokenizer.json`, run by the library `tokenizers`, which is an extra: `pip install "tilewright[models]"`.

In: the file, or its folder. Special ids and the chat template come from the files beside it: `tokenizer_config.json`,
`generation_config.json`, `config.json`, `chat_template.jinja`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tilewright.base.errors import UserError
from tilewright.execute.numpy_files import opened, shown_name
from tilewright.models.formats.json_files import MOST_BYTES, read_json
from tilewright.models.tokenizers.base import Tokenizer, checked_text
from tilewright.models.tokenizers.vocabulary import ENDS

_MOST_PARTS = 8
"""Ids that one character may have; after so many what does not decode is shown as it is."""


class LibraryTokenizer(Tokenizer):
    """A `tokenizer.json`. The library splits, merges and decodes."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            library = importlib.import_module("tokenizers")
        except ImportError:
            raise UserError.at("TW008", f"'{path}' is read by the package tokenizers, which is not installed", help='pip install "tilewright[models]"') from None
        place = Path(path)
        place = place / "tokenizer.json" if place.is_dir() else place
        file, size = opened(place)
        with file:
            if size > MOST_BYTES:
                raise UserError.at("TW007", f"file '{place}' has {size} bytes, more than {MOST_BYTES}")
            data = file.read()
        try:
            self._tokenizer: Any = library.Tokenizer.from_buffer(data)
        except Exception as error:  # the library raises plain `Exception`
            raise UserError.at("TW007", f"file '{place}' is no tokenizer: {shown_name(str(error))}") from None
        beside = {name: read_json(place.parent / name) if (place.parent / name).is_file() else {} for name in ("tokenizer_config.json", "generation_config.json", "config.json")}
        self.vocabulary_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        config = beside["tokenizer_config.json"]
        self.bos, self.eos = (self._id(config.get(f"{name}_token")) for name in ("bos", "eos"))
        ends = [self.eos, *(self.id_of(name) for name in ENDS)]
        for name in ("generation_config.json", "config.json"):
            first, listed = beside[name].get("bos_token_id"), beside[name].get("eos_token_id")
            some = [id for id in (listed if isinstance(listed, list) else [listed]) if type(id) is int and 0 <= id < self.vocabulary_size]
            self.bos = first if self.bos is None and type(first) is int and 0 <= first < self.vocabulary_size else self.bos
            self.eos = some[0] if self.eos is None and some else self.eos
            ends += some
        self.eot = frozenset(id for id in ends if id is not None)
        self.chat_template = self._template(config.get("chat_template"), place.parent / "chat_template.jinja")

    @staticmethod
    def _template(given: Any, path: Path) -> str | None:
        if isinstance(given, list):
            # Several, with names.
            named = {entry.get("name"): entry.get("template") for entry in given if isinstance(entry, dict)}
            given = named.get("default")
        if isinstance(given, str):
            return given
        if not path.is_file():
            return None
        file, size = opened(path)
        with file:
            try:
                return file.read(min(size, MOST_BYTES)).decode("utf-8")
            except UnicodeDecodeError:
                raise UserError.at("TW007", f"file '{path}' is not UTF-8") from None

    def _id(self, token: Any) -> int | None:
        text = token.get("content") if isinstance(token, dict) else token
        return self.id_of(text) if isinstance(text, str) else None

    def encode(self, text: str, *, add_bos: bool | None = None, special: bool = False) -> list[int]:
        # The library takes the names of special tokens for those, unless it is told that they are text.
        if self._tokenizer.encode_special_tokens is special:
            self._tokenizer.encode_special_tokens = not special
        found = list(self._tokenizer.encode(checked_text(text), add_special_tokens=add_bos is not False).ids)
        if add_bos and self.bos is not None and found[:1] != [self.bos]:
            found.insert(0, self.bos)
        return found

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        return str(self._tokenizer.decode([self.checked(id) for id in ids], skip_special_tokens=not special))

    def pieces(self, ids: Iterable[int], *, special: bool = False) -> Iterator[str]:
        """The text of each id as it comes. What an id stands for may depend on those before it, so these are decoded again, behind a first letter."""
        kept: list[int] = list(self._tokenizer.encode("a", add_special_tokens=False).ids)
        shown, rest = len(kept), ""
        for id in ids:
            kept.append(self.checked(id))
            before, text = self.decode(kept[:shown], special=special), self.decode(kept, special=special)
            rest = text[len(before) :]
            if text.endswith("\ufffd") and len(kept) - shown < _MOST_PARTS:
                yield ""
                continue
            yield rest
            kept, shown, rest = kept[shown:], len(kept) - shown, ""
        if rest:
            yield rest

    def piece(self, id: int, *, special: bool = False) -> bytes:
        return self.decode([id], special=special).encode("utf-8")

    def token(self, id: int) -> str:
        return str(self._tokenizer.id_to_token(self.checked(id)))

    def id_of(self, token: str) -> int | None:
        found = self._tokenizer.token_to_id(token)
        return None if found is None else int(found)
