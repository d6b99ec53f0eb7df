"""Tokenizers: of GGUF files with no other library, and of `tokenizer.json` with the library `tokenizers`."""

from tilewright.models.tokenizers.base import Tokenizer
from tilewright.models.tokenizers.choose import from_file, from_gguf, from_model

__all__ = ["Tokenizer", "from_file", "from_gguf", "from_model"]
