"""The generated parts of `docs/language.md`: the grammar as `zyn.lark` has it, and the words the compiler knows.

In: the document's text. Out: the same with the text between `<!-- NAME -->` and `<!-- end -->` written anew. From the command line
`python -m tilewright.frontend.zyn.reference docs/language.md` does so in place.
"""

from __future__ import annotations

import re
import sys
from importlib import resources
from pathlib import Path

from tilewright.base.dtypes import SCALARS
from tilewright.tree.check.expressions import FUNCTIONS
from tilewright.tree.metadata import REDUCTION_NAMES, KernelKind, attribute_names

_LAYOUT = {"LRECORD": '"{"', "ELSE_VALUE": '"else"'}
_MADE = ("INDENT", "DEDENT")


def grammar() -> str:
    """The rules of the language in a form to read: no marks for the parser generator, words as they are written."""
    text = resources.files("tilewright.frontend.zyn").joinpath("zyn.lark").read_text(encoding="utf-8")
    words = dict(re.findall(r'^([A-Z]+): ("[^"]+")$', text, re.MULTILINE))
    declared = re.search(r"^%declare (.+)$", text, re.MULTILINE)
    assert declared is not None
    words |= {name: f'"{name.lower()}"' for name in declared[1].split() if name not in _LAYOUT and name not in _MADE} | _LAYOUT
    rules, terminals = text[text.index("start:") :].split("// -- terminals", 1)
    rules = re.sub(r"[ \t]+-> [a-z_]+\b", "", rules)
    rules = re.sub(r"\?(?=[a-z_]+:)", "", rules)
    rules = re.sub(r"(?<![A-Za-z])_(?=[a-z])", "", rules)
    rules = re.sub(r'(?<!")\b[A-Z_]+\b(?!")', lambda found: words.get(found[0], found[0]), rules)
    kept = [line for line in terminals.split("\n") if (found := re.match(r"([A-Z]+)(?:\.\d+)?: (/.+/)$", line)) and found[1] != "NEWLINE"]
    lexical = [re.sub(r"^([A-Z]+)(?:\.\d+)?:", r"\1:", line) for line in kept]
    lines = [line.rstrip() for line in rules.rstrip().split("\n")]
    return "\n".join(_shorter(line) for line in [*lines, "", "// -- names and literals", "", *lexical])


def _shorter(line: str) -> str:
    """Headings of the grammar without their rule to the right."""
    return re.sub(r"^(// -- .+?) -+$", r"\1", line)


def parts() -> dict[str, str]:
    """The generated parts by name."""
    return {
        "grammar": f"```text\n{grammar()}\n```",
        "functions": _row(sorted(FUNCTIONS)),
        "types": _row([dtype.name for dtype in SCALARS]),
        "attributes": _row([f"@{name}" for name in attribute_names()]),
        "kinds": _row([kind.value for kind in KernelKind]),
        "reductions": _row(list(REDUCTION_NAMES)),
    }


def _row(words: list[str]) -> str:
    return " ".join(f"`{word}`" for word in words)


def renewed(text: str) -> str:
    """The document with its generated parts as they should be."""
    for name, part in parts().items():
        begin = f"<!-- {name} -->\n"
        assert text.count(begin) == 1, name
        head, rest = text.split(begin)
        text = f"{head}{begin}{part}\n{rest[rest.index('<!-- end -->') :]}"
    return text


if __name__ == "__main__":
    document = Path(sys.argv[1])
    document.write_text(renewed(document.read_text(encoding="utf-8")), encoding="utf-8")
