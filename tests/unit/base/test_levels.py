"""Optimisation levels: words, which one holds, and what they mean for targets."""

from __future__ import annotations

import pytest

from tilewright.base import levels
from tilewright.base.errors import UserError
from tilewright.base.target import host_cpu, parse_target


def test_words_and_refusals() -> None:
    assert levels.checked("Os") == "Os"
    assert levels.checked(None) == levels.checked("") == ""
    with pytest.raises(UserError, match="choose one of O0, O1, O2, O3, Os, Olatency, tiered"):
        levels.checked("O4")
    with pytest.raises(UserError, match="did you mean 'Olatency'"):
        levels.checked("Olatncy")
    with pytest.raises(UserError, match="optimize is 2"):
        levels.checked(2)


def test_the_command_line_comes_first_then_the_kernel_then_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert levels.holds("") == "O2"
    monkeypatch.setenv("TILEWRIGHT_OPTIMIZE", "os")
    assert levels.holds("") == "Os"
    assert levels.holds("O1") == "O1"
    with levels.given("O0"):
        assert levels.holds("O1") == "O0"
        with levels.given("O3"):
            assert levels.holds("") == "O3"
        assert levels.holds("") == "O0"
    assert levels.holds("O1") == "O1"
    monkeypatch.setenv("TILEWRIGHT_OPTIMIZE", "fast")
    with pytest.raises(UserError, match="TILEWRIGHT_OPTIMIZE"):
        levels.holds("")


def test_a_level_is_part_of_a_target_where_it_makes_other_code() -> None:
    cpu, gpu, web = host_cpu(), parse_target("sm_90a"), parse_target("wgsl")
    assert levels.at(cpu, "") is cpu and levels.at(cpu, "O2") is cpu and levels.at(cpu, "tiered") is cpu
    keys = {levels.at(cpu, name).key() for name in levels.LEVELS}
    assert len(keys) == len(levels.LEVELS)
    assert levels.at(gpu, "O1").level == "O1" and levels.at(gpu, "Os") is gpu and levels.at(gpu, "O3") is gpu
    assert levels.at(web, "O0") is web
    assert levels.at(levels.at(cpu, "O1"), "") == cpu


@pytest.mark.parametrize(
    ("word", "target", "followed", "text"),
    [
        ("Os", "cpu", True, "small code"),
        ("O2", "sm_90a", True, "the default"),
        ("O3", "sm_90a", True, "same as at O2"),
        ("Olatency", "sm_90a", False, "same as at O2"),
        ("O0", "wgsl", False, "own compiler decides"),
        ("tiered", "cpu", True, "exchanged"),
        ("tiered", "sm_90a", False, "compiled once"),
    ],
)
def test_what_becomes_of_a_level(word: str, target: str, followed: bool, text: str) -> None:
    done, said = levels.fate(word, parse_target(target))
    assert done is followed and text in said


def test_the_command_line_overrules_a_kernel_and_says_so() -> None:
    with levels.given("O0"):
        assert levels.fate("O3", host_cpu()) == (False, "the command line says O0")
