"""The list of slow tests names what is there, and leaves a fast run something of every layer."""

from __future__ import annotations

from pathlib import Path

import pytest

from slow import SLOW, is_slow

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("path", SLOW)
def test_what_is_listed_exists(path: str) -> None:
    assert (TESTS / path).exists()


def test_the_list_is_in_order_without_repetition() -> None:
    assert list(SLOW) == sorted(set(SLOW))
    assert not [path for path in SLOW if any(path != other and path.startswith(f"{other}/") for other in SLOW)]


@pytest.mark.parametrize("folder", ["base", "tree", "frontend", "analysis", "passes", "ir", "compile", "codegen", "runtime", "execute", "cli"])
def test_a_fast_run_has_something_of_every_layer(folder: str) -> None:
    assert any(not is_slow(str(path.relative_to(TESTS))) for path in (TESTS / "unit" / folder).glob("test_*.py"))


def test_there_is_one_conftest() -> None:
    """Tests import it by its name, which only one module can have."""
    assert list(TESTS.rglob("conftest.py")) == [TESTS / "conftest.py"]
