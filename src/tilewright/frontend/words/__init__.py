"""The words of the kernel languages: `rows` declares them, `objects` has those with members. All are names of this package."""

from __future__ import annotations

from tilewright.frontend.words.python_words import NAMES, python_word


def __getattr__(name: str) -> object:
    if name in NAMES:
        return python_word(name)
    raise AttributeError(f"module 'tilewright.frontend.words' has no attribute '{name}'")
