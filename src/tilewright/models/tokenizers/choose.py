"""The tokenizer that a file asks for. In: metadata of GGUF, a `tokenizer.json`, or an open model; out: a `Tokenizer`, or an error that lists those there are."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from tilewright.base.errors import UserError
from tilewright.execute.numpy_files import shown_name
from tilewright.models.formats.model_file import ModelFile
from tilewright.models.tokenizers.base import Tokenizer
from tilewright.models.tokenizers.bpe import BytePairTokenizer
from tilewright.models.tokenizers.library import LibraryTokenizer
from tilewright.models.tokenizers.spm import SentencePieceTokenizer
from tilewright.models.tokenizers.wordpiece import WordPieceTokenizer

_KINDS: dict[str, Callable[[Mapping[str, Any]], Tokenizer]] = {"llama": SentencePieceTokenizer, "gpt2": BytePairTokenizer, "bert": WordPieceTokenizer}
"""Tokenizers by what `tokenizer.ggml.model` calls them."""


def from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer in the metadata of a GGUF file. Raises `UserError`."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None:
        raise UserError.at("TW007", "the file has no tokenizer: there is no key tokenizer.ggml.model", help="give a tokenizer of its own, tokenizers.from_file(…)")
    make = _KINDS.get(kind) if isinstance(kind, str) else None
    if make is None:
        raise UserError.at("TW005", f"the tokenizer is of the kind {shown_name(str(kind))}", help=f"known are {', '.join(_KINDS)}")
    return make(metadata)


def from_file(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer in a `tokenizer.json`, or in a folder that holds one. Raises `UserError`."""
    return LibraryTokenizer(path)


def from_model(file: ModelFile) -> Tokenizer:
    """The tokenizer that comes with a model."""
    return from_gguf(file.metadata) if file.kind == "gguf" else from_file(file.path)
