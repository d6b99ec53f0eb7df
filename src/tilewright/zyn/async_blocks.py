"""`@async` blocks and `await` of ZynML. In: a compute block and its arguments, or what is awaited; out: futures, or their
results.

A block marked `@async` gives a future, as a kernel called with `asynchronous=True` does. Futures are arguments of other blocks
like arrays. `await f`, `await all(fs)` and `await any(fs)` wait; with `timeout t else v` the value is `v` where that takes
longer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tilewright.base.errors import UserError
from tilewright.base.source import Span
from tilewright.execute.asynchronous import call_later, call_now
from tilewright.execute.calls.run import Runner
from tilewright.execute.devices import device_of, find_device
from tilewright.runtime.core.futures import Future, all_of, any_of
from tilewright.tree.syntax import Function


class _AsyncBlock:
    """A compute block with the face of a kernel."""

    asynchronous = False

    def __init__(self, runner: Runner, function: Function, names: tuple[str, ...], device: str) -> None:
        self.runner, self.function, self.parameter_names = runner, function, names
        self.device = None if device == "auto" else device
        self.__name__ = function.name

    def __call__(self, *args: object, device: str | None = None) -> object:
        chosen = device or self.device or device_of(list(args)) or "auto"
        return self.runner.run(dict(zip(self.parameter_names, args, strict=True)), find_device(chosen))


def run_block(runner: Runner, function: Function, arguments: Mapping[str, object], device: str) -> object:
    """Run a block that is `@async` or has futures among its arguments."""
    block: Any = _AsyncBlock(runner, function, tuple(arguments), device)
    args = tuple(arguments.values())
    # Where nothing says otherwise a block runs on the first GPU, not on the default device of kernels.
    if block.device is None:
        known = [part.pending if isinstance(a, Future) and (part := a.on_device()) is not None else a for a in args]
        block.device = device_of(known) or find_device("auto").id
    marked = any(attribute.name == "async" for attribute in function.attributes)
    return call_later(block, args, {}) if marked else call_now(block, args, {})


def run_at_once(
    run: Callable[[Function, dict[str, object], str], object], function: Function, arguments: Mapping[str, object], device: str
) -> object:
    """Such a block for somebody who only looks at blocks, or runs them one by one: futures are done from the start."""
    given = {name: value.result() if isinstance(value, Future) else value for name, value in arguments.items()}
    result = run(function, given, device)
    if not any(attribute.name == "async" for attribute in function.attributes):
        return result
    done: Future[Any] = Future()
    done.set_result(result)
    return done


def wait_for(mode: str, value: object, timeout: object, otherwise: object, span: Span) -> object:
    """What `await` gives. `timeout` is in seconds, None where there is none."""
    if mode == "one":
        if not isinstance(value, Future):
            raise UserError.at("TW009", f"await of a {type(value).__name__}", span, "await what a block marked @async gave")
        future: Future[Any] = value
    elif not isinstance(value, tuple | list) or not value or not all(isinstance(part, Future) for part in value):
        raise UserError.at("TW009", f"await {mode}(…) of something else than futures", span, f"write await {mode}([a, b])")
    else:
        future = all_of(value) if mode == "all" else any_of(value)
    if timeout is None:
        return future.result()
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or timeout < 0:
        raise UserError.at("TW009", f"the timeout is {timeout!r}", span, "write a time, as in 'timeout 100ms'")
    return future.result(timeout=timeout, default=otherwise)
