"""Every example of `docs/ir.md` is real: it parses, verifies and prints as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tilewright.ir.text import print_kernel, print_program
from tilewright.ir.text_parse import parse_kernel, parse_program
from tilewright.ir.verify import verify_kernel, verify_program

DOCUMENT = Path(__file__).parents[3] / "docs" / "ir.md"
EXAMPLES = re.findall(r"```kir\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)


def test_there_are_examples_of_every_stage() -> None:
    assert all(
        any(word in example for example in EXAMPLES)
        for word in ("stage=loop", "stage=tile", "stage=thread", "program @")
    )


@pytest.mark.parametrize("text", EXAMPLES, ids=lambda text: text.split(" {")[0])
def test_example(text: str) -> None:
    if text.startswith("program"):
        program = parse_program(text)
        verify_program(program)
        assert print_program(program) == text
    else:
        kernel = parse_kernel(text)
        verify_kernel(kernel)
        assert print_kernel(kernel) == text
