"""The session of docs/emulator.md is what the commands say.

A `python file=NAME` block is that file. A `console` block has one command after `$ ` and what it prints; `edit="a => b"` changes the file
before. Behind the debugger's prompt stands what is typed.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner
from test_docs import fences

from tilewright.cli.main import cli

NAME = "docs/emulator.md"


def test_the_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file, ran = Path(), 0
    for fence in fences(NAME):
        if fence.info.startswith("python file="):
            file = Path(fence.info.split("=")[1])
            file.write_text(fence.text, encoding="utf-8")
        elif fence.info.startswith("console"):
            change = re.fullmatch(r'console edit="(.*) => (.*)"', fence.info)
            if change:
                old, new = (part.replace("\\n", "\n") for part in change.groups())
                text = file.read_text(encoding="utf-8")
                assert text.count(old) == 1, old
                file.write_text(text.replace(old, new), encoding="utf-8")
            command, _, expected = fence.text.partition("\n")
            typed = re.findall(r"^\(tw\) (.*)$", expected, re.MULTILINE)
            result = CliRunner().invoke(cli, shlex.split(command.removeprefix("$ tilewright ")), input="".join(f"{line}\n" for line in typed))
            shown = re.sub(r"> \S*/", "> ", result.output)
            assert shown == re.sub(r"^\(tw\) .*\n", "(tw) ", expected, flags=re.MULTILINE), command
            ran += 1
    assert ran == 6
