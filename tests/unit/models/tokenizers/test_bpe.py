"""Byte-pair tokenizers: rules that split texts against what the library `tokenizers` does with them, merges against a plain implementation."""

from __future__ import annotations

import json
import random
import re
import unicodedata
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import tilewright as tw
from tilewright.models import tokenizers
from tilewright.models.tokenizers.pretokens import split_rule
from tilewright.models.tokenizers.unicode_classes import is_in

GOLDEN = json.loads((Path(__file__).parents[3] / "data" / "pretokens.json").read_text(encoding="utf-8"))
LIKE_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?[a-zA-Z]+| ?[0-9]+| ?[^\sa-zA-Z0-9]+|\s+(?!\S)|\s+"


@pytest.mark.parametrize("rule", GOLDEN["words"])
def test_words_are_those_of_the_reference(rule: str) -> None:
    for text, lengths in zip(GOLDEN["texts"], GOLDEN["words"][rule]):
        words = split_rule(rule).words(text)
        assert "".join(words) == text
        assert [len(word) for word in words] == lengths, ascii(text)


def test_classes_are_those_of_unicode() -> None:
    """For all characters that the Unicode of this Python knows; new ones may come, old ones stay."""
    for point in range(0x110000):
        category = unicodedata.category(chr(point))
        if category != "Cn":
            for name in "LNPM":
                assert is_in(name, point) == (category[0] == name), hex(point)


def test_rules_that_there_are_not() -> None:
    with pytest.raises(tw.UserError, match=r"'tekken'.*\n.*llama-bpe.*qwen2"):
        split_rule("tekken")
    assert split_rule(None) is split_rule("default")


# -- merges -----------------------------------------------------------------------------------------------------------


def printable() -> dict[int, str]:
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    made = {byte: chr(byte) for byte in plain}
    for byte in range(256):
        made.setdefault(byte, chr(256 + len(made) - len(plain)))
    return made


CHARACTERS = printable()


def vocabulary(seed: int = 0, pre: str | None = "gpt-2", count: int = 300) -> dict[str, Any]:
    """Metadata with random merges, not all of whose results are made in one way only."""
    rng = random.Random(seed)
    pieces = [CHARACTERS[byte] for byte in b"abcdelorw 12.'\xc3\xa9\xe6"]
    merges: list[str] = []
    for _ in range(count):
        left, right = rng.choice(pieces), rng.choice(pieces)
        if len(left + right) < 8:
            merges.append(f"{left} {right}")
            pieces.append(left + right)
    tokens = [*dict.fromkeys([*CHARACTERS.values(), *pieces]), "<|begin|>", "<|im_end|>", "<user>"]
    kinds = [1] * (len(tokens) - 3) + [3, 3, 4]
    found = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": merges, "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": len(tokens) - 3, "tokenizer.ggml.eos_token_id": len(tokens) - 2,
    }  # fmt: skip
    return found if pre is None else {**found, "tokenizer.ggml.pre": pre}


def merged(metadata: dict[str, Any], word: str, whole: bool = False) -> list[int]:
    """The ids of a word: the first merge of the list that fits anywhere, at its leftmost place, again and again."""
    ids = {token: id for id, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(metadata["tokenizer.ggml.merges"]):
        ranks.setdefault(merge, rank)
    symbols = [CHARACTERS[byte] for byte in word.encode()]
    if whole and "".join(symbols) in ids:
        return [ids["".join(symbols)]]
    while True:
        pairs = [(ranks[f"{a} {b}"], at) for at, (a, b) in enumerate(pairwise(symbols)) if f"{a} {b}" in ranks]
        if not pairs:
            return [ids[symbol] for symbol in symbols]
        at = min(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe"])
def test_merges(pre: str) -> None:
    rng = random.Random(3)
    for seed in range(5):
        metadata = vocabulary(seed, pre)
        tokenizer = tokenizers.from_gguf(metadata)
        for length in [0, 1, 2, 31, *rng.sample(range(200), 15)]:
            text = "".join(rng.choice("aabbcdelorw  12.'é日\n") for _ in range(length))
            words = split_rule(pre).words(text)
            if pre == "gpt-2" and text.isascii():
                assert words == re.findall(LIKE_GPT2, text)
            wanted = [id for word in words for id in merged(metadata, word, pre == "llama-bpe")]
            assert tokenizer.encode(text, add_bos=False) == wanted
            assert tokenizer.decode(wanted) == text
        long = "".join(rng.choice("abcde") for _ in range(3000))
        assert tokenizer.encode(long, add_bos=False) == merged(metadata, long, pre == "llama-bpe")


def test_special_tokens_and_what_the_file_says() -> None:
    metadata = vocabulary()
    tokenizer = tokenizers.from_gguf(metadata)
    bos, end, user = (tokenizer.id_of(name) for name in ("<|begin|>", "<|im_end|>", "<user>"))
    assert tokenizer.bos == bos and tokenizer.eos == end and tokenizer.eot == {end}
    a = tokenizer.encode("a")
    assert tokenizer.encode("a<|im_end|>a<user>a", special=True) == [*a, end, *a, user, *a]
    assert tokenizer.encode("a<user>a") == [*a, user, *a]
    assert end not in tokenizer.encode("<|im_end|>")
    assert tokenizer.decode([*a, end, user]) == "a<user>" and tokenizer.decode([*a, end], special=True) == "a<|im_end|>"
    assert tokenizer.encode("a", add_bos=True) == [bos, *a]
    assert tokenizers.from_gguf(vocabulary(pre="llama-bpe")).encode("")[:1] == [bos]
    assert tokenizers.from_gguf({**metadata, "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}).encode("") == [bos, end]
    assert tokenizers.from_gguf(vocabulary(pre=None)).encode("") == []
    assert list(tokenizer.pieces([tokenizer.id_of(CHARACTERS[byte]) or 0 for byte in "é日".encode()])) == ["", "é", "", "", "日"]


def test_what_is_refused() -> None:
    metadata = vocabulary()
    del metadata["tokenizer.ggml.merges"]
    with pytest.raises(tw.UserError, match="merges is missing"):
        tokenizers.from_gguf(metadata)
    with pytest.raises(tw.UserError, match="merges is no list"):
        tokenizers.from_gguf({**metadata, "tokenizer.ggml.merges": 3})
    few = {**vocabulary(), "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.token_type": [1]}
    assert tokenizers.from_gguf(few).encode("a") == [0]
    with pytest.raises(tw.UserError, match="no token for byte 0x62"):
        tokenizers.from_gguf(few).encode("b")


def test_the_library_on_random_texts() -> None:
    """Trained tokenizers, 300 texts of any characters for each rule."""
    library: Any = pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
    rng = random.Random(4)

    def text() -> str:
        points = (rng.choice([rng.randrange(0x80), rng.randrange(0x3000), rng.randrange(0x110000)]) for _ in range(rng.randrange(40)))
        return "".join(chr(point) for point in points if not 0xD800 <= point < 0xE000) + rng.choice(["", " it's", "\n\n x", "12345", "  "])

    corpus = [text() for _ in range(300)] + ["the words of a text, and 123 numbers; it's here"] * 20
    for pre in GOLDEN["words"]:
        rule = split_rule(pre)
        other = library.Tokenizer(library.models.BPE(ignore_merges=rule.whole_words))
        splits = [library.pre_tokenizers.Split(library.Regex(expression), "isolated") for expression in rule.expressions]
        other.pre_tokenizer = library.pre_tokenizers.Sequence([*splits, library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        alphabet = library.pre_tokenizers.ByteLevel.alphabet()
        other.train_from_iterator(corpus, library.trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False))
        model = json.loads(other.to_str())["model"]
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
        tokens = sorted(model["vocab"], key=model["vocab"].get)
        tokenizer = tokenizers.from_gguf({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": merges})
        for _ in range(300):
            sample = text()
            assert tokenizer.encode(sample, add_bos=False) == other.encode(sample).ids, (pre, ascii(sample))
