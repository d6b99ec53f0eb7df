"""`tw.debug`: follow one thread of an explicit kernel through its source, in Python's debugger or with a function of one's own.

In: which kernel, block and thread, and the lines to stop at. While it is active, launches of that kernel run on the emulator,
built so that they stop before each statement. Out: at each stop pdb's prompt, with the kernel's variables as local ones: `p x`
prints, `n` goes to the next line of the thread, `c` to the next line asked for, `q` ends the launch; `l`, `w` and `p` are
pdb's own. With `record=True` nothing is asked and every stop is kept in `stops`.
"""

from __future__ import annotations

import pdb
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import FrameType, TracebackType

from tilewright.base.errors import UserError
from tilewright.ir.emulator.warps.stepping import Steps, Stop, stepping
from tilewright.runtime.core import streams

Index = int | tuple[int, ...]


class Leave(BaseException):
    """The launch was ended at the debugger's prompt. Not an `Exception`, so that kernels' callers do not swallow it."""


class debug:
    """Calls inside the `with` are followed in one thread. `lines` are those to stop at; None for the first line reached."""

    def __init__(
        self, kernel: object = None, *, block: Index = 0, thread: Index = 0, lines: int | Iterable[int] | None = None,
        record: bool = False, on_stop: Callable[[Stop], str | None] | None = None,
    ) -> None:  # fmt: skip
        if record and on_stop is not None:
            raise UserError.at("TW016", "tw.debug takes record=True or on_stop, not both")
        name = kernel if isinstance(kernel, str) else getattr(kernel, "__name__", None) if kernel is not None else ""
        if not isinstance(name, str):
            raise UserError.at("TW009", f"tw.debug takes a kernel or its name, got {kernel!r}")
        self.block, self.thread = _index("block", block), _index("thread", thread)
        self.lines = None if lines is None else frozenset([lines] if isinstance(lines, int) else lines)
        self.stops: list[Stop] = []
        self._action = self._keep if record else on_stop or self._ask
        self._halt = self.lines is None or record
        """Whether to stop at the next statement, whatever its line."""
        self._record = record
        self._steps = Steps(self._told, name, self.block, self.thread)
        self.left = False
        """Whether a launch was ended at a stop."""
        self._entered: list[ExitStack] = []

    def __enter__(self) -> debug:
        with ExitStack() as stack:
            stack.enter_context(stepping(self._steps))
            # Calls that were made before must not go straight to the device.
            stack.enter_context(streams.special())
            self._entered.append(stack.pop_all())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        self._entered.pop().close()
        self.left = self.left or kind is Leave
        return kind is Leave

    # -- stops --------------------------------------------------------------------------------------------------------

    def _told(self, stop: Stop) -> None:
        if not (self._halt or (self.lines is not None and stop.line in self.lines)):
            return
        if self._record and self.lines is not None and stop.line not in self.lines:
            return
        answer = self._action(stop) or "continue"
        if answer not in ("step", "continue", "quit"):
            raise UserError.at("TW009", f"on_stop says 'step', 'continue' or 'quit', got {answer!r}")
        if answer == "quit":
            raise Leave
        self._halt = answer == "step"

    def _keep(self, stop: Stop) -> str:
        self.stops.append(stop)
        return "step"

    def _ask(self, stop: Stop) -> str:
        self.stops.append(stop)
        return ask(stop)


def _index(what: str, given: Index) -> Index:
    parts = given if isinstance(given, tuple) else (given,)
    if not parts or not all(isinstance(p, int) and not isinstance(p, bool) and p >= 0 for p in parts):
        raise UserError.at("TW009", f"tw.debug takes {what}= as a number or a tuple of them, got {given!r}")
    return given


def stop_text(stop: Stop) -> str:
    """One line: where it is, and the numbers among its variables."""
    numbers = ", ".join(f"{name} = {value!r}" for name, value in stop.variables.items() if isinstance(value, bool | int | float))
    who = f"block {_shown(stop.block)}, thread {_shown(stop.thread)}"
    return f"{stop.span.path}:{stop.line} in {stop.function}, {who}: {numbers or 'no variables yet'}"


def _shown(index: tuple[int, ...]) -> str:
    return str(index[0]) if len(index) == 1 else str(index)


def ask(stop: Stop) -> str:
    """Python's debugger at that statement; gives what to do then."""
    prompt = _Prompt()
    names = {**stop.variables, "everyone": stop.everyone}
    # A frame of its own, at the very line of the kernel's source: what pdb shows and looks names up in.
    code = compile("\n" * (stop.line - 1) + "__here__()", stop.span.path, "exec").replace(co_name=stop.function)
    names["__here__"] = lambda: prompt.at(sys._getframe(1))
    exec(code, {"__builtins__": __builtins__, "__name__": stop.kernel}, names)
    return prompt.answer


class _Prompt(pdb.Pdb):
    """pdb, whose words for going on are ours."""

    def __init__(self) -> None:
        # Streams that are named lose the line editor, so only those of no terminal are.
        own = sys.stdin is not None and sys.stdin.isatty()
        super().__init__(
            stdin=None if own else sys.stdin, stdout=None if own else sys.stdout, nosigint=True, readrc=False
        )
        self.prompt = "(tw) "
        self.answer = "continue"

    def at(self, frame: FrameType) -> None:
        """Ask, with nothing but this frame to be seen."""
        self.reset()
        self.botframe = frame
        self.interaction(frame, None)

    def _go(self, answer: str) -> bool:
        self.answer = answer
        return True

    def do_next(self, arg: str) -> bool:
        """n(ext): go to the next statement of this thread."""
        return self._go("step")

    def do_continue(self, arg: str) -> bool:
        """c(ontinue): go to the next line asked for."""
        return self._go("continue")

    def do_quit(self, arg: str) -> bool:
        """q(uit): end the launch."""
        return self._go("quit")

    do_n = do_s = do_step = do_next
    do_c = do_cont = do_continue
    do_q = do_exit = do_EOF = do_quit
