"""The vocabulary in the metadata of a GGUF file. In: the keys `tokenizer.*`; out: tokens, their types and scores, and special ids.

Defaults are those of llama.cpp, since they are what files leave out.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from tilewright.base.errors import UserError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of tokens, as files number them."""
_PREFIX = "tokenizer.ggml."

ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>",
    "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
)  # fmt: skip
"""Tokens at which generation stops, whatever their type: files do not list them all."""
_FILL = (
    "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>",
    "<SUF>", "▁<SUF>", "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|fim_pad|>", "<fim-pad>", "<fim_pad>",
    "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<|fim_sep|>", "<|file_sep|>", "<fim-sep>",
)  # fmt: skip
"""Control tokens of models that fill in code; some files call them normal."""


class Vocabulary:
    """Tokens by id, with what the file says of them."""

    def __init__(self, metadata: Mapping[str, Any], defaults: Mapping[str, int | bool]) -> None:
        self._metadata = metadata
        self._defaults = defaults
        self.tokens: list[str] = self._list("tokens", str)
        if not self.tokens:
            raise _wrong("tokenizer.ggml.tokens is empty")
        self.size = len(self.tokens)

    # -- keys ---------------------------------------------------------------------------------------------------------

    def _list(self, key: str, kind: type | tuple[type, ...], length: int | None = None) -> list[Any]:
        name = _PREFIX + key
        values = self._metadata.get(name)
        if not isinstance(values, list) or (values and not (isinstance(values[0], kind) and isinstance(values[-1], kind))):
            raise _wrong(f"{name} is missing" if values is None else f"{name} is no list of what it should hold")
        if length is not None and len(values) < length:
            raise _wrong(f"{name} has {len(values)} elements, and there are {length} tokens")
        return values

    def has(self, key: str) -> bool:
        return _PREFIX + key in self._metadata

    def text(self, key: str) -> str | None:
        """A string of the file; None where there is none."""
        value = self._metadata.get(_PREFIX + key)
        if value is not None and not isinstance(value, str):
            raise _wrong(f"{_PREFIX}{key} is no string")
        return value

    def flag(self, key: str) -> bool:
        value = self._metadata.get(_PREFIX + key, self._defaults.get(key, False))
        if not isinstance(value, bool):
            raise _wrong(f"{_PREFIX}{key} is {value!r}, neither true nor false")
        return value

    def id(self, key: str) -> int | None:
        """A special id, such as `bos_token_id`; None where there is none, or where it is the id of no token, as files say that there is none."""
        value = self._metadata.get(_PREFIX + key, self._defaults.get(key))
        if value is not None and type(value) is not int:
            raise _wrong(f"{_PREFIX}{key} is {value!r}, no id")
        return value if value is not None and 0 <= value < self.size else None

    @cached_property
    def scores(self) -> list[float]:
        if not self.has("scores"):
            return [0.0] * self.size
        return self._list("scores", (int, float), self.size)

    @cached_property
    def merges(self) -> list[str]:
        return self._list("merges", str)

    @property
    def chat_template(self) -> str | None:
        value = self._metadata.get("tokenizer.chat_template")
        if value is not None and not isinstance(value, str):
            raise _wrong("tokenizer.chat_template is no string")
        return value

    # -- tokens -------------------------------------------------------------------------------------------------------

    @cached_property
    def ids(self) -> dict[str, int]:
        """Tokens to ids; the last of equal ones counts, and empty ones have other names."""
        found = dict(zip(self.tokens, range(self.size)))
        if "" in found:
            del found[""]
            found |= {f"[EMPTY_{id}]": id for id, token in enumerate(self.tokens) if not token}
        return found

    @cached_property
    def types(self) -> np.ndarray:
        """The type of each token, with those overruled whose names say that they are control tokens."""
        if not self.has("token_type"):
            types = np.full(self.size, NORMAL, np.int64)
        else:
            values = self._list("token_type", int, self.size)
            try:
                types = np.array(values[: self.size], np.int64)
            except (TypeError, ValueError, OverflowError):
                raise _wrong(f"{_PREFIX}token_type holds what are no types") from None
        for name in (*ENDS, *_FILL):
            if (id := self.ids.get(name)) is not None:
                types[id] = CONTROL
        return types

    @cached_property
    def special(self) -> list[int]:
        """Ids of tokens that texts may name: control, unknown and user-defined ones, the longest first."""
        found = np.flatnonzero(np.isin(self.types, (UNKNOWN, CONTROL, USER_DEFINED))).tolist()
        return sorted((id for id in found if self.tokens[id]), key=lambda id: -len(self.tokens[id].encode("utf-8")))

    @cached_property
    def ends(self) -> frozenset[int]:
        """Ids at which generation stops."""
        keys = (self.id(key) for key in ("eos_token_id", "eot_token_id", "eom_token_id"))
        names = {name: id for name in ENDS if (id := self.ids.get(name)) is not None}
        if "<|end|>" in names and (names.keys() >= {"<|return|>", "<|call|>"} or names.keys() >= {"<|calls|>", "<|flush|>"}):
            # Of these models' turns, `<|end|>` ends one part only.
            del names["<|end|>"]
        return frozenset(id for id in (*keys, *names.values()) if id is not None)


def _wrong(reason: str) -> UserError:
    error = UserError.at("TW007", f"the tokenizer cannot be read: {reason}")
    assert isinstance(error, UserError)
    return error
