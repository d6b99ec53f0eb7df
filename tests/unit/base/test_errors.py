"""Errors and the places they point at."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

from tilewright.base.errors import (
    CODES,
    CompilerBug,
    DeviceError,
    Diagnostic,
    Diagnostics,
    TargetLimit,
    TilewrightError,
    UserError,
    in_order,
)
from tilewright.base.source import NOWHERE, Source, Span

SOURCE = Source("kernel.py", "first\n  second = x\r\nthird\n", first_line=10)
SECOND = Span(SOURCE, 11, 3, 11, 9)


def test_a_message_has_place_line_and_help() -> None:
    error = UserError.at("TW002", "unknown name 'x'", SECOND, help="declare it")
    assert str(error) == (
        "kernel.py:11:3: error[TW002]: unknown name 'x'\n"
        "    |\n 11 |   second = x\n    |   ^^^^^^\nhelp: declare it"
    )  # fmt: skip
    assert (error.code, error.span) == ("TW002", SECOND)


def test_a_message_without_a_place() -> None:
    assert str(DeviceError.at("TW030", "no device")) == "error[TW030]: no device"
    assert (UserError().code, UserError().span) == ("", NOWHERE)


def test_calls_that_led_to_it_are_shown() -> None:
    inner = SECOND.called_at(Span(SOURCE, 10, 1, 10, 6)).called_at(Span(SOURCE, 12, 1, 12, 6))
    assert [call.line for call in inner.calls()] == [10, 12]
    assert inner.places() == "kernel.py:11:3, called at kernel.py:10:1, called at kernel.py:12:1"
    assert Diagnostic("TW001", "no", inner).render().count("called here") == 2


def test_kinds_are_apart() -> None:
    kinds = (UserError, TargetLimit, DeviceError, CompilerBug)
    for kind in kinds:
        assert issubclass(kind, TilewrightError)
        assert not any(issubclass(kind, other) for other in kinds if other is not kind)


def test_an_unknown_code_is_refused() -> None:
    with pytest.raises(AssertionError):
        UserError.at("TW999", "no")
    with pytest.raises(AssertionError):
        Diagnostics().error("TW999", "no")


def test_every_code_is_explained() -> None:
    text = (Path(__file__).parents[3] / "docs" / "errors.md").read_text(encoding="utf-8")
    assert set(re.findall(r"TW\d{3}", text)) >= CODES.keys()


def test_a_sink_raises_all_at_once_in_order() -> None:
    sink = Diagnostics()
    sink.warn("TW019", "not used", SECOND)
    sink.raise_if_errors()

    def report() -> None:
        with sink.collecting():
            sink.error("TW002", "later", Span(SOURCE, 12, 1, 12, 2))
            sink.error("TW001", "sooner", SECOND)
            sink.error("TW001", "sooner", SECOND)

    with pytest.raises(UserError) as caught:
        report()
    assert [d.message for d in caught.value.diagnostics] == ["sooner", "later"]
    assert [d.severity for d in in_order(sink.items)] == ["warning", "error", "error"]


def test_lines_of_a_source() -> None:
    assert [SOURCE.line(number) for number in (9, 10, 11, 12, 99)] == ["", "first", "  second = x", "third", ""]
    assert Span(SOURCE, 10, 3, 11, 2).excerpt().endswith("|   ^^^")
    assert Span(None, 3, 1).excerpt() == Span(SOURCE).excerpt() == ""
    assert (NOWHERE.place(), Span(SOURCE).place()) == ("<generated>", "kernel.py")


def test_places_travel_between_processes() -> None:
    assert pickle.loads(pickle.dumps(SECOND)) == SECOND
