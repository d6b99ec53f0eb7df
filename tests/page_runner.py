"""Run a page of the documents as its reader would: block by block, in one file that grows.

    python tests/page_runner.py docs/tutorial.md folder

What the blocks mean:

- ```python: pasted at the end of `NAME.py` (the page's name) and run, with the names of the blocks before it.
  `print(…)  # text` must print that text; `# such as text` stands where the text differs from run to run, and must print something.
- ```python error: tried and taken out again. It raises an error of Tilewright; the next ```text block is its message.
- ```sh: commands, run in the folder. A ```text block behind it has lines of the output, in order, with `…` for what is left out.
- ```c, ```cuda and others are for the eye.

The first block that does otherwise ends the run: its line in the page and what happened go to stderr, and the exit status is 1.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import re
import shlex
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Block:
    """A fenced block: what stands after the backticks, its text, the number of its first line."""

    info: str
    text: str
    line: int


class WrongPage(Exception):
    """A block does not do what the page says."""


def blocks_of(text: str) -> Iterator[Block]:
    for match in re.finditer(r"^```([^\n]*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        yield Block(match[1], match[2], text.count("\n", 0, match.start()) + 2)


class PageRunner:
    """The reader's file and folder, and the names that the blocks so far have made."""

    def __init__(self, page: Path, folder: Path) -> None:
        self.blocks = list(blocks_of(page.read_text(encoding="utf-8")))
        self.file = folder / f"{page.stem.replace('-', '_')}.py"
        self.source = ""
        self.names: dict[str, Any] = {"__name__": "__main__", "__file__": str(self.file)}

    def run(self) -> int:
        """Run every block; how many ran."""
        ran = 0
        for number, block in enumerate(self.blocks):
            behind = self.blocks[number + 1] if number + 1 < len(self.blocks) else None
            shown = behind.text if behind is not None and behind.info == "text" else ""
            try:
                ran += self.run_block(block, shown)
            except WrongPage as error:
                raise WrongPage(f"line {block.line}: {error}") from None
        return ran

    def run_block(self, block: Block, shown: str) -> int:
        if block.info == "python":
            self.run_python(block.text)
        elif block.info == "python error":
            self.run_wrong(block.text, shown)
        elif block.info == "sh":
            self.run_commands(block.text, shown)
        else:
            return 0
        return 1

    def _execute(self, text: str) -> str:
        """Run text as the end of the file; what it prints."""
        self.file.write_text(self.source + text, encoding="utf-8")
        linecache.checkcache(str(self.file))
        code = compile("\n" * self.source.count("\n") + text, str(self.file), "exec")
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(code, self.names)
        return output.getvalue()

    def run_python(self, text: str) -> None:
        expected = re.findall(r"^\s*print\(.*\)  # (.+)$", text, re.MULTILINE)
        if len(expected) != len(re.findall(r"^\s*print\(", text, re.MULTILINE)):
            raise WrongPage("a print does not say what it prints")
        try:
            printed = self._execute(text).splitlines()
        except Exception:
            raise WrongPage(f"it raised\n{traceback.format_exc()}") from None
        self.source += text
        if len(printed) != len(expected) or any(
            not (line if wanted.startswith("such as ") else line == wanted) for line, wanted in zip(printed, expected, strict=True)
        ):
            raise WrongPage(f"it prints {printed}, and should {expected}")

    def run_wrong(self, text: str, shown: str) -> None:
        from tilewright.base.errors import TilewrightError

        try:
            self._execute(text)
        except TilewrightError as error:
            message = str(error).replace(str(self.file), self.file.name)
        except Exception:
            raise WrongPage(f"it raised another error\n{traceback.format_exc()}") from None
        else:
            raise WrongPage("it raised no error")
        finally:
            self.file.write_text(self.source, encoding="utf-8")
            linecache.checkcache(str(self.file))
        if message != shown.rstrip("\n"):
            raise WrongPage(f"the message is\n{message}")

    def run_commands(self, text: str, shown: str) -> None:
        output = "".join(self._command(line) for line in text.splitlines() if line.strip())
        rest = iter(line.strip() for line in output.splitlines())
        for line in shown.splitlines():
            if line.strip() != "…" and line.strip() not in rest:
                raise WrongPage(f"{line!r} is not printed. All of it:\n{output}")

    def _command(self, line: str) -> str:
        from tilewright.cli.main import cli

        program, *words = shlex.split(line, comments=True)
        if program == "tilewright":
            output = io.StringIO()
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                try:
                    cli.main(words, standalone_mode=False)
                except SystemExit as end:
                    if end.code:
                        raise WrongPage(f"{line}: exit status {end.code}\n{output.getvalue()}") from None
                except Exception:
                    raise WrongPage(f"{line}: {traceback.format_exc()}") from None
            return output.getvalue()
        if words[:3] == ["-m", "pip", "install"] or program == "make":
            return ""  # the reader's own environment
        raise WrongPage(f"{line}: no command that a page may have")


def main() -> int:
    page, folder = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    import os

    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        ran = PageRunner(page, folder).run()
    except WrongPage as error:
        print(f"{page.name}: {error}", file=sys.stderr)
        return 1
    print(f"{ran} blocks")
    return 0


if __name__ == "__main__":
    sys.exit(main())
