"""Ctrl-C during long CPU kernels: a signal handler in machine code asks them to leave (`codegen.host.pool`).

In: the pool's code. Out: the functions around calls that may last. The handler takes the place of Python's while that is the one that
raises `KeyboardInterrupt`, and calls it. Another handler of the user's is left alone: it may want the call to go on. Whoever sets one
later takes ours away; the next long call of the main thread looks, and puts it back where it may.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading

from tilewright.base import abi
from tilewright.runtime.core.builtin import bind_python
from tilewright.runtime.core.objects import ObjectCode, bind_symbol


class _State(ctypes.Structure):
    """What the handler and the calls share; laid out as in the machine code."""

    _fields_ = [("previous", ctypes.c_void_p), ("main", ctypes.c_uint64), ("active", ctypes.c_int32), ("count", ctypes.c_int32), ("relayed", ctypes.c_int32)]


def _watch() -> None:
    """Take the place of the handler that raises `KeyboardInterrupt`."""
    if _code is None or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    get, put = ctypes.pythonapi.PyOS_getsig, ctypes.pythonapi.PyOS_setsig
    get.restype, put.restype = ctypes.c_void_p, ctypes.c_void_p
    put.argtypes = [ctypes.c_int, ctypes.c_void_p]
    ours = _code.address("tilewright_on_interrupt")
    found = get(abi.SIGINT)
    if found and found != ours and found != 1:  # neither the system's way, nor ignored
        _state().previous = found
        put(abi.SIGINT, ours)


def _state() -> _State:
    assert _code is not None
    return _State.from_address(_code.data("tilewright_interrupt_state"))


_code: ObjectCode | None = None


def bind() -> None:
    """Before the pool's code is loaded: what it names."""
    bind_python()
    bind_symbol("tilewright_watch", id(_watch))


def provide(code: ObjectCode) -> None:
    """Use this code's functions."""
    global _code
    if os.name == "posix":
        _code = code
        _after_fork()


def _after_fork() -> None:
    if _code is not None:
        _state().main = threading.main_thread().ident or 0
        _state().active = _state().relayed = 0


def end_of_call(stopped: int) -> None:
    """After a launch that says whether it was interrupted: raise what Ctrl-C raises."""
    if stopped:
        # In the main thread Python's handler raises; a call of another thread that ran meanwhile did not end either.
        ctypes.pythonapi.PyErr_CheckSignals()
        raise KeyboardInterrupt


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
