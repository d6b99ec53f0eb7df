"""Tokenizers of SentencePiece's kind against a plain implementation: every pair is looked at, the best one is merged, until there is none."""

from __future__ import annotations

import itertools
import random
import re
from typing import Any

import pytest

import tilewright as tw
from tilewright.models import tokenizers

SPECIAL = {0: ("<unk>", 2), 1: ("<s>", 3), 2: ("</s>", 3), 3: ("<|turn|>", 3), 4: ("<user>", 4), 5: ("\n\n", 4), 6: ("<user>>", 4), 7: ("<end_of_turn>", 1)}
LETTERS = [*list("abcdeh▁lorw日本é😀.,"), "\n"]


def vocabulary(seed: int = 0, fallback: bool = True) -> dict[str, Any]:
    """Metadata with random merges of a few letters."""
    rng = random.Random(seed)
    tokens = [(token, 0.0, kind) for token, kind in SPECIAL.values()]
    tokens += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)] if fallback else []
    pieces = list(LETTERS)
    for _ in range(300):
        made = rng.choice(pieces) + rng.choice(pieces)
        if made not in pieces and len(made) < 9:
            pieces.append(made)
    tokens += [(piece, float(-rng.randrange(200)), 1) for piece in pieces]
    texts, scores, kinds = (list(column) for column in zip(*tokens))
    return {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": texts, "tokenizer.ggml.scores": scores, "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0, "tokenizer.chat_template": "{{ x }}",
    }  # fmt: skip


def merged(metadata: dict[str, Any], text: str) -> list[int]:
    """The ids of a text without special tokens."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    ids = {token: id for id, token in enumerate(tokens)}
    symbols = list(text.replace(" ", "▁"))
    while True:
        pairs = [(scores[ids[a + b]], -at) for at, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in ids]
        if not pairs:
            break
        at = -max(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    found: list[int] = []
    for symbol in symbols:
        found += [ids[symbol]] if symbol in ids else [ids.get(f"<0x{byte:02X}>", 0) for byte in symbol.encode()]
    return found


def random_text(rng: random.Random, length: int) -> str:
    def character() -> str:
        if rng.random() < 0.85:
            return rng.choice([*LETTERS, " ", " ", "  "])
        while 0xD800 <= (point := rng.randrange(0x110000)) < 0xE000:
            pass
        return chr(point)

    return "".join(character() for _ in range(length))


@pytest.mark.parametrize("prefix", [True, False])
def test_random_texts(prefix: bool) -> None:
    rng = random.Random(1)
    for seed in range(6):
        metadata = vocabulary(seed)
        metadata["tokenizer.ggml.add_space_prefix"] = prefix
        tokenizer = tokenizers.from_gguf(metadata)
        for length in [0, 1, 2, 3, 31, *rng.sample(range(300), 20), 700]:
            text = re.sub("\n+", "\n", random_text(rng, length)).replace("<", "")
            wanted = merged(metadata, " " + text if prefix and text else text)
            assert tokenizer.encode(text, add_bos=False) == wanted, (seed, text)
            assert tokenizer.encode(text) == [1, *wanted]
            assert tokenizer.decode(wanted) == text.replace("▁", " ")


def test_long_texts_are_cut_where_nothing_is_merged() -> None:
    """Long ones, with spaces, without any, and of one letter."""
    rng = random.Random(2)
    metadata = vocabulary(9)
    metadata["tokenizer.ggml.add_space_prefix"] = False
    tokenizer = tokenizers.from_gguf(metadata)
    for text in ("".join(rng.choice("abcdehlor日本é") for _ in range(2300)), "a" * 2100, " " * 500, "hello world, " * 60):
        assert tokenizer.encode(text, add_bos=False) == merged(metadata, text)


def test_special_tokens() -> None:
    tokenizer = tokenizers.from_gguf({**vocabulary(), "tokenizer.ggml.add_space_prefix": False})
    plain = tokenizer.encode("a<|turn|>b<s>", add_bos=False)
    assert 3 not in plain and 1 not in plain and tokenizer.decode(plain) == "a<|turn|>b<s>"
    a, b = tokenizer.encode("a", add_bos=False), tokenizer.encode("b", add_bos=False)
    assert tokenizer.encode("a<|turn|>b<s>", special=True) == [1, *a, 3, *b, 1]
    # User-defined tokens always count, the longest first.
    assert tokenizer.encode("a<user>>b<user>", add_bos=False) == [*a, 6, *b, 4]
    assert tokenizer.encode("\n\n\n\na", add_bos=False) == [5, 5, *a]
    assert tokenizer.encode("", add_bos=False) == [] and tokenizer.encode("") == [1]
    # The name of one that ends turns makes it a control token.
    assert tokenizer.encode("<end_of_turn>", special=True) == [1, 7]
    assert tokenizer.eot == {2, 7} and tokenizer.bos == 1 and tokenizer.eos == 2
    ids = [1, *a, 3, *b, 2]
    assert tokenizer.decode(ids) == "ab" and tokenizer.decode(ids, special=True) == "<s>a<|turn|>b</s>"
    assert tokenizer.chat_template == "{{ x }}" and tokenizer.token(3) == "<|turn|>" and tokenizer.id_of("<|turn|>") == 3 and tokenizer.id_of("none") is None


def test_a_space_before_a_text_and_after_special_tokens() -> None:
    metadata = vocabulary()
    tokenizer = tokenizers.from_gguf(metadata)
    assert tokenizer.encode("a<s>b", special=True) == [1, *merged(metadata, " a"), 1, *merged(metadata, " b")]
    assert tokenizer.decode(tokenizer.encode(" a b")) == " a b"


def test_end_of_texts() -> None:
    metadata = {**vocabulary(), "tokenizer.ggml.add_eos_token": True}
    assert tokenizers.from_gguf(metadata).encode("a")[-1] == 2
    assert tokenizers.from_gguf(metadata).encode("a", add_bos=False)[-1] != 2
    silent = tokenizers.from_gguf({**vocabulary(), "tokenizer.ggml.add_bos_token": False})
    assert silent.encode("") == [] and silent.encode("", add_bos=True) == [1]


def test_characters_come_whole() -> None:
    tokenizer = tokenizers.from_gguf(vocabulary())
    id = {byte: 8 + byte for byte in range(256)}
    assert list(tokenizer.pieces([id[0xC3], id[0xA9], id[0x41]])) == ["", "é", "A"]
    assert list(tokenizer.pieces(id[b] for b in "😀".encode())) == ["", "", "", "😀"]
    assert list(tokenizer.pieces([id[0xC3], id[0x41]])) == ["", "\ufffdA"]
    assert list(tokenizer.pieces([id[0x41], id[0xF0], id[0x9F]])) == ["A", "", "", "\ufffd"]
    assert "".join(tokenizer.pieces([1, *tokenizer.encode("héllo 😀 wörld", add_bos=False)])) == " héllo 😀 wörld"
    assert list(tokenizer.pieces([])) == []


def test_characters_without_tokens() -> None:
    tokenizer = tokenizers.from_gguf(vocabulary(fallback=False))
    assert tokenizer.encode("ß", add_bos=False)[-1:] == [0]


def test_what_is_refused() -> None:
    tokenizer = tokenizers.from_gguf(vocabulary())
    for ids in ([-1], [tokenizer.vocabulary_size]):
        with pytest.raises(tw.UserError, match="there is no token"):
            tokenizer.decode(ids)
    with pytest.raises(tw.UserError, match="surrogate"):
        tokenizer.encode("a\ud800")
    with pytest.raises(tw.UserError, match="a bytes"):
        tokenizer.encode(b"a")  # type: ignore[arg-type]
    good = vocabulary()
    for change, words in (
        ({"tokenizer.ggml.model": "t5"}, "'t5'"), ({"tokenizer.ggml.model": 3}, "'3'"), ({"tokenizer.ggml.tokens": []}, "tokens is empty"),
        ({"tokenizer.ggml.tokens": 7}, "tokens is no list"), ({"tokenizer.ggml.scores": [0.0]}, "scores has 1 elements"),
        ({"tokenizer.ggml.token_type": ["x"] * len(good["tokenizer.ggml.tokens"])}, "token_type is no list"),
        ({"tokenizer.ggml.bos_token_id": "1"}, "bos_token_id"), ({"tokenizer.ggml.add_bos_token": 1}, "add_bos_token"),
    ):  # fmt: skip
        with pytest.raises(tw.UserError, match=words):
            tokenizers.from_gguf({**good, **change}).encode("a")
    with pytest.raises(tw.UserError, match="has no tokenizer"):
        tokenizers.from_gguf({})
