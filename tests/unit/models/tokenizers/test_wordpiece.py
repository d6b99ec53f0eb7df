"""WordPiece: words are cut and covered as BERT does it."""

from __future__ import annotations

import random
import unicodedata
from typing import Any

import pytest

import tilewright as tw
from tilewright.models import tokenizers

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁hello", "▁wor", "ld", "▁,", "▁cafe", "▁日", "▁本", "▁h", "e", "▁!", "▁σ", "s", "ς", "σ"]


def vocabulary(**changes: Any) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": WORDS, "tokenizer.ggml.token_type": [3, 2, 3, 3] + [1] * (len(WORDS) - 4), "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.bos_token_id": 2, "tokenizer.ggml.seperator_token_id": 3, **changes,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("", []), (" \t\n", []), ("Hello, WORLD!", ["▁hello", "▁,", "▁wor", "ld", "▁!"]), ("café\u0301", ["▁cafe"]), ("日本", ["▁日", "▁本"]), ("he hee", ["▁h", "e", "▁h", "e", "e"]),
        ("hello\u200bworld", ["[UNK]"]), ("hel\x00lo\ufffd", ["▁hello"]), ("xyz hello", ["[UNK]", "▁hello"]), ("h" + "e" * 99, ["▁h", *["e"] * 99]), ("h" + "e" * 100, ["[UNK]"]),
        ("Σς", ["▁σ", "ς"]), ("hello\u00a0hello", ["▁hello", "▁hello"]), ("[SEP]", ["[UNK]", "[UNK]", "[UNK]"]),
    ],
)  # fmt: skip
def test_words(text: str, tokens: list[str]) -> None:
    tokenizer = tokenizers.from_gguf(vocabulary())
    ids = tokenizer.encode(text, add_bos=False)
    assert [tokenizer.token(id) for id in ids] == tokens
    assert tokenizer.encode(text) == [2, *ids, 3]


def test_special_tokens_and_text() -> None:
    tokenizer = tokenizers.from_gguf(vocabulary())
    assert tokenizer.encode("hello[SEP]hello", special=True) == [2, 4, 3, 4, 3]
    assert tokenizer.decode(tokenizer.encode("Hello world, hello")) == "hello world , hello"
    assert list(tokenizer.pieces([4, 5, 6])) == [" hello", " wor", "ld"]
    cased = tokenizers.from_gguf(vocabulary(**{"tokenizer.ggml.normalizer.lowercase": False}))
    assert cased.encode("Hello hello café", add_bos=False) == [1, 4, 1]
    assert tokenizers.from_gguf(vocabulary(**{"tokenizer.ggml.add_bos_token": False})).encode("hello") == [4]


def is_settled(point: int) -> bool:
    """Whether all versions of Unicode say the same of a character: the library has an old one."""
    category = unicodedata.category(chr(point))
    return category not in ("Cn", "Cs") and category == unicodedata.ucd_3_2_0.category(chr(point))


def test_the_library_on_random_texts() -> None:
    """300 texts of characters of which all versions of Unicode say the same."""
    library: Any = pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
    rng = random.Random(8)
    for lower in (True, False):
        names = {token if token.startswith("[") else token[1:] if token.startswith("▁") else f"##{token}": id for id, token in enumerate(WORDS)}
        other = library.Tokenizer(library.models.WordPiece(names, unk_token="[UNK]", max_input_chars_per_word=100))
        other.normalizer, other.pre_tokenizer = library.normalizers.BertNormalizer(lowercase=lower), library.pre_tokenizers.BertPreTokenizer()
        tokenizer = tokenizers.from_gguf(vocabulary(**{"tokenizer.ggml.normalizer.lowercase": lower}))
        for _ in range(300):
            points = [rng.choice([rng.randrange(0x80), rng.randrange(0x3000), rng.randrange(0x110000)]) for _ in range(12)]
            text = "".join(rng.choice(["hello", "é", "日", " ", "Σ", chr(p) if is_settled(p) else ""]) for p in points)
            assert tokenizer.encode(text, add_bos=False) == other.encode(text).ids, ascii(text)


def test_what_is_refused() -> None:
    with pytest.raises(tw.UserError, match="seperator_token_id"):
        tokenizers.from_gguf(vocabulary(**{"tokenizer.ggml.seperator_token_id": []}))
