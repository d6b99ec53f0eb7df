r"""Rules that split a text into words before merges, by their names in GGUF files (`tokenizer.ggml.pre`).

In: a text; out: its words, in order, all of the text. A rule is one or more regular expressions with classes of Unicode such as `\p{L}`. Each
cuts the pieces that those before it left into what it matches and what is between. Python's `re` has no such classes, and its `\s` has more
characters than theirs. So the expressions run on a copy of the text in which every character beyond ASCII stands for its class.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tilewright.base.errors import UserError
from tilewright.execute.numpy_files import shown_name
from tilewright.models.tokenizers.unicode_classes import is_in

_SPACES = frozenset([0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000])
_STANDS_FOR = {"L": "é", "N": "²", "P": "¿", "M": "¸"}
"""Characters that stand for their class; `¤` for those of none, and a vertical tab for spaces."""
_SETS = {
    r"\p{L}": "A-Za-zé", r"\p{N}": "0-9²", r"\p{P}": r"!-#%-*,-/:;?@\[-\]_{}¿", r"\p{M}": "¸", r"\s": r"\t-\r ",
}  # fmt: skip


class _ClassCopy(dict[int, int]):
    """What each character becomes, found out when it is first met."""

    def __missing__(self, point: int) -> int:
        if point < 128:
            stands_for = chr(point)
        elif point in _SPACES:
            stands_for = "\v"
        else:
            stands_for = next((character for name, character in _STANDS_FOR.items() if is_in(name, point)), "¤")
        self[point] = ord(stands_for)
        return self[point]


_COPY = _ClassCopy()


def _compiled(expression: str) -> re.Pattern[str]:
    """An expression over the copy of a text. Classes stand inside brackets, or become some."""
    made, inside, at = "", False, 0
    while at < len(expression):
        name = next((name for name in _SETS if expression.startswith(name, at)), None)
        if name is not None:
            made += _SETS[name] if inside else f"[{_SETS[name]}]"
            at += len(name)
            continue
        if expression.startswith(r"\S", at):
            made += f"[^{_SETS[chr(92) + 's']}]"
            at += 2
            continue
        step = 2 if expression[at] == "\\" else 1
        inside = expression[at] == "[" or (inside and expression[at] != "]")
        made += expression[at : at + step]
        at += step
    return re.compile(made)


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SHORT = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_LLAMA3 = _SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_QWEN35 = _SHORT + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class SplitRule:
    """Expressions, one after the other; whether words that are tokens are taken whole; whether texts begin with BOS where a file does not say."""

    expressions: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False

    def words(self, text: str) -> list[str]:
        """The text in words."""
        copy = text if text.isascii() else text.translate(_COPY)
        bounds = [0, len(text)] if text else [0]
        for expression in self.expressions:
            bounds = _cut(_pattern(expression), copy, bounds)
        return [text[begin:end] for begin, end in zip(bounds, bounds[1:])]  # noqa: RUF007 (the faster form)


def _cut(pattern: re.Pattern[str], copy: str, bounds: list[int]) -> list[int]:
    """The bounds of pieces, with those of what matches inside them."""
    if len(bounds) == 2:
        found = [0]
        for match in pattern.finditer(copy):
            begin, end = match.span()
            if begin != found[-1]:
                found.append(begin)
            found.append(end)
        return found if found[-1] == len(copy) else [*found, len(copy)]
    found = bounds[:1]
    for start, stop in zip(bounds, bounds[1:]):  # noqa: RUF007
        for match in pattern.finditer(copy, start, stop):
            begin, end = match.span()
            if begin != found[-1]:
                found.append(begin)
            found.append(end)
        if found[-1] != stop:
            found.append(stop)
    return found


_PATTERNS: dict[str, re.Pattern[str]] = {}


def _pattern(expression: str) -> re.Pattern[str]:
    found = _PATTERNS.get(expression)
    if found is None:
        found = _PATTERNS[expression] = _compiled(expression)
    return found


_DEFAULT = SplitRule((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))
_RULES: dict[SplitRule, tuple[str, ...]] = {
    _DEFAULT: ("default",),
    SplitRule((_GPT2,)): ("gpt-2", "phi-2", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "gigachat", "a.x-4.0", "mellum", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4"),
    SplitRule((_LLAMA3,), whole_words=True, add_bos=True): ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
    SplitRule((_LLAMA3,)): ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"),
    SplitRule((_QWEN2,)): ("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan", "solar-open"),
    SplitRule((_QWEN35,)): ("qwen35",),
    SplitRule((r"\p{N}", _GPT2)): ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
    SplitRule((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")): ("falcon",),
}
_BY_NAME = {name: rule for rule, names in _RULES.items() for name in names}


def split_rule(name: str | None) -> SplitRule:
    """The rule of that name; the default one where a file names none. Raises `UserError`."""
    if name is None:
        return _DEFAULT
    if name not in _BY_NAME:
        raise UserError.at("TW005", f"the tokenizer splits texts by the rule {shown_name(name)} (tokenizer.ggml.pre)", help=f"known are {', '.join(_BY_NAME)}")
    return _BY_NAME[name]
