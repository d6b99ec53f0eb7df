"""`@tw.critical`: a Python function becomes machine code that Python calls within some tens of nanoseconds.

The function is compiled when it is first called, or by `compile()`. From then on calls of Python's own numbers, of states and of NumPy arrays go straight to
machine code; anything else (keywords, NumPy's numbers, an int for a float) is converted here first, or refused with what is wrong.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar, overload

import numpy as np

from tilewright.base import levels
from tilewright.base.dtypes import DType
from tilewright.base.errors import CompilerBug, DeviceError, UserError, public
from tilewright.base.forks import fork_safe_rlock
from tilewright.base.source import Span
from tilewright.base.target import Target, host_cpu
from tilewright.codegen.critical.entry import ENTRY, TIMER, TYPE_SYMBOL
from tilewright.codegen.host.interpreter import ARRAY_DATA, HEADER, TYPE, stubs_work
from tilewright.compile.critical import CompiledCritical, compile_critical
from tilewright.compile.critical_proof import CriticalProof, prove, refusal
from tilewright.frontend.critical.parameters import NO_VALUE, CriticalParameter, CriticalSignature, read_signature
from tilewright.frontend.critical.reader import BuiltCritical, build_critical
from tilewright.frontend.critical.state import NativeState
from tilewright.frontend.python.sources import keep_source
from tilewright.frontend.simt.source import FunctionSource, read_source
from tilewright.runtime.core.builtin import METH_FASTCALL_KEYWORDS, MethodDefinition, builtin_function
from tilewright.runtime.core.callables import set_code, takes_code, with_code
from tilewright.runtime.core.critical_symbols import bind_critical
from tilewright.runtime.core.objects import ObjectCode, bind_symbol
from tilewright.tree.metadata import ExecutionConstraints

P = ParamSpec("P")
R = TypeVar("R")
_OVERFLOWS = ("check", "wrap")
_MEMORIES = ("stack",)
_loading = fork_safe_rlock()
"""Symbols of types are bound for one function at a time."""


class CriticalIndexError(UserError, IndexError):
    """An index lay outside its array."""


class CriticalDivisionError(UserError, ZeroDivisionError):
    """A division of whole numbers by zero."""


class CriticalOverflowError(UserError, OverflowError):
    """A whole number did not fit."""


class CriticalValueError(UserError, ValueError):
    """A value that an operation does not take."""


class CriticalAssertionError(UserError, AssertionError):
    """An assertion did not hold."""


_FAULTS: dict[str, tuple[type[UserError], str]] = {
    "IndexError": (CriticalIndexError, "TW013"), "ZeroDivisionError": (CriticalDivisionError, "TW009"), "OverflowError": (CriticalOverflowError, "TW006"),
    "ValueError": (CriticalValueError, "TW009"), "AssertionError": (CriticalAssertionError, "TW037"),
}  # fmt: skip


class LoadedCritical:
    """Linked code: where its entry and its timing loop are."""

    def __init__(self, compiled: CompiledCritical) -> None:
        self.compiled = compiled
        with _loading:
            bind_critical()
            for position, parameter in enumerate(compiled.built.signature.parameters):
                if parameter.state is not None:
                    bind_symbol(f"{TYPE_SYMBOL}{position}", id(parameter.state))
            self.objects = ObjectCode(compiled.code)
            self.entry = self.objects.address(ENTRY)
            self.timer = self.objects.address(TIMER)


class CriticalFunction(Generic[P, R]):
    """A critical function. Call it as it is written."""

    __slots__ = ()
    __simt_function__: Callable[P, R]
    """What other critical functions read in the place of a call."""
    __name__: str
    __qualname__: str
    overflow: str
    optimize: str
    annotations: dict[str, object]
    """Those whose values were known where it was marked."""
    constraints: ExecutionConstraints
    """What it promises and aims for."""

    def __call__(self, *args: P.args, **named: P.kwargs) -> R:
        return self.general(*args, **named)  # type: ignore[no-any-return]

    # -- stages -----------------------------------------------------------------------------------------------------

    @functools.cached_property
    def source(self) -> FunctionSource:
        return read_source(self.__simt_function__)

    @functools.cached_property
    def signature(self) -> CriticalSignature:
        return read_signature(self.source, self.annotations)

    @property
    def span(self) -> Span:
        """Where its definition begins."""
        return self.source.head()

    @functools.cached_property
    def target(self) -> Target:
        """This machine, at the function's level."""
        return levels.at(host_cpu(), self.optimize)

    @functools.cached_property
    def built(self) -> BuiltCritical:
        """The function at the thread stage."""
        return build_critical(self.source, self.signature, self.overflow == "wrap")

    @functools.cached_property
    def compiled(self) -> CompiledCritical:
        """The function as machine code."""
        return compile_critical(self.built, self.target)

    @functools.cached_property
    def loaded(self) -> LoadedCritical:
        """The code in this process; from here on calls go straight to it."""
        _require_interpreter(self.span)
        self._keep_promises()
        with _loading:
            # Another thread may have come first; code that calls already go to must live on.
            known: LoadedCritical | None = self.__dict__.get("_loaded_code")
            if known is None:
                known = self.__dict__["_loaded_code"] = LoadedCritical(self.compiled)
                if takes_code(type(self)):
                    set_code(self, known.entry)
        return known

    @public
    def compile(self) -> CriticalFunction[P, R]:
        """Compile it now, not at the first call; gives the function itself. Raises what is wrong with it."""
        _ = self.loaded
        return self

    @functools.cached_property
    def _proof(self) -> CriticalProof:
        return prove(self.__name__, self.compiled, self.target)

    @public
    def proof(self) -> CriticalProof:
        """What the machine code does, read off the emitted object: instructions, calls, stack, the longest way through it. `print` shows it."""
        return self._proof

    def _keep_promises(self) -> None:
        """Raise the error for a promise that the emitted code does not keep."""
        for name in ("no_allocation", "no_syscalls"):
            if getattr(self.constraints, name) and not getattr(self._proof, name):
                raise refusal(self.__name__, self.compiled, self._proof, name)

    def assembly(self) -> str:
        """The machine's instructions: of the function as it is inlined in its entry, and of the loop that times it."""
        from tilewright.codegen.llvm.native import emit_assembly

        return emit_assembly(self.compiled.text, self.target)

    # -- calls ------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def entry(self) -> Callable[..., Any]:
        """The function as a builtin function of Python, which Python calls some nanoseconds quicker. It takes exact arguments only, by position."""
        return _builtin(self, self.loaded)

    @public
    def general(self, *args: object, **named: object) -> Any:
        """A call with any arguments: what is missing is the default, what is not exact is converted, or refused."""
        return self.entry(*self.exact(args, named))

    def exact(self, args: tuple[object, ...], named: dict[str, object]) -> list[object]:
        """The arguments in order, each as machine code takes it. Raises `UserError`."""
        signature = self.signature
        names = [p.name for p in signature.parameters]
        if len(args) > signature.positional:
            raise UserError.at("TW016", f"{self.__name__} takes {signature.positional} argument(s) by position ({', '.join(names)}), got {len(args)}", self.span)
        given: dict[str, object] = dict(zip(names, args, strict=False))
        for name, value in named.items():
            if name not in names:
                raise UserError.at("TW016", f"{self.__name__} has no argument '{name}'", self.span, f"its arguments are {', '.join(names) or 'none'}")
            if name in given:
                raise UserError.at("TW016", f"{self.__name__} got '{name}' twice", self.span)
            given[name] = value
        found = []
        for parameter in signature.parameters:
            value = given.get(parameter.name, parameter.default)
            if value is NO_VALUE:
                raise UserError.at("TW016", f"{self.__name__} is missing '{parameter.name}'", self.span)
            found.append(self._exact(parameter, value))
        return found

    def _exact(self, parameter: CriticalParameter, value: object) -> object:
        what = f"'{parameter.name}' of {self.__name__}"
        if parameter.state is not None:
            if type(value) is not parameter.state:
                layout = parameter.layout
                other = f"a {type(value).__name__} of {value.nbytes} bytes" if isinstance(value, NativeState) else f"a {type(value).__name__}"
                raise UserError.at("TW009", f"{what} is a {layout.name} of {layout.size} bytes, got {other}", parameter.span, "states of another class lie differently")
            return value
        assert parameter.dtype is not None
        if parameter.shape:
            return self._exact_array(parameter, parameter.dtype, what, value)
        return exact_number(parameter.dtype, value, what, parameter.span)

    def _exact_array(self, parameter: CriticalParameter, dtype: DType, what: str, value: object) -> object:
        shape = list(parameter.shape)
        if type(value) is not np.ndarray:
            raise UserError.at("TW009", f"{what} is an array of {dtype}{shape}, got a {type(value).__name__}", parameter.span, "give a NumPy array")
        if value.dtype != dtype.numpy or value.shape != parameter.shape:
            raise UserError.at("TW009", f"{what} is an array of {dtype}{shape}, got {value.dtype}{list(value.shape)}", parameter.span, "its form is fixed: convert it before the call")
        if parameter.name in self.built.written and not value.flags.writeable:
            raise UserError.at("TW018", f"{what} is read-only, but the function writes to it", parameter.span)
        if not value.flags.c_contiguous or not value.flags.aligned:
            raise UserError.at("TW009", f"{what} does not lie side by side in memory", parameter.span, "give np.ascontiguousarray(...): a copy, which writes do not reach")
        if value.dtype is not dtype.numpy:
            value = value.view(dtype.numpy)  # the same numbers under NumPy's own object
        return value

    @public
    def failed(self, number: int, first: int, second: int) -> NoReturn:
        """Raise the error of a fault; machine code calls it."""
        span, said = self.compiled.faults[number - 1]
        name, _, text = said.partition(": ")
        kind, code = _FAULTS[name]
        raise kind.at(code, f"{text.format(first, second)}, in {self.__name__}", span)

    # -- the core it is for -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def pinned(self) -> Iterator[int]:
        """The calling thread runs on the function's core (`cpu=`) inside of `with`, and where it may run as before after it."""
        core = self.constraints.cpu_affinity
        if core is None:
            raise UserError.at("TW009", f"{self.__name__} names no core", self.span, "write @tw.critical(cpu=3)")
        with pinned_to(core, self.span):
            yield core

    def __reduce__(self) -> str:
        return self.__qualname__

    def __repr__(self) -> str:
        return f"<critical function {self.__name__}({', '.join(p.name for p in self.signature.parameters)})>"


class _PlainFunction(CriticalFunction[P, R]):
    """Where Python makes no class with a slot for code: calls go by way of `__call__`."""


CodeFunction: type[CriticalFunction[..., Any]] = with_code(CriticalFunction)
if not takes_code(CodeFunction):
    CodeFunction = _PlainFunction


class _BoundCritical:
    """What a builtin entry asks: faults are the function's; arguments that are not exact are a mistake of ours."""

    def __init__(self, function: CriticalFunction[..., Any], loaded: LoadedCritical) -> None:
        self.function, self.loaded = function, loaded
        self.method = MethodDefinition(function.__name__.encode(), loaded.entry, METH_FASTCALL_KEYWORDS, None)
        self.failed = function.failed

    def general(self, *args: object, **named: object) -> Any:
        exact = self.function.exact(args, named)
        if not named and len(args) == len(exact) and all(a is b for a, b in zip(args, exact, strict=True)):
            raise CompilerBug.at("TW040", f"the entry of {self.function.__name__} does not take {', '.join(type(a).__name__ for a in args)}", self.function.span)
        return self.function.entry(*exact)


def _builtin(function: CriticalFunction[..., Any], loaded: LoadedCritical) -> Callable[..., Any]:
    bound = _BoundCritical(function, loaded)
    return builtin_function(bound.method, bound)


def exact_number(dtype: DType, value: object, what: str, span: Span) -> int | float | bool:
    """A number as machine code takes it: Python's own. Raises `UserError` for what is none or does not fit."""
    if dtype.is_bool:
        if not isinstance(value, bool | np.bool_):
            raise UserError.at("TW009", f"{what} is a bool, got {value!r}", span)
        return bool(value)
    if dtype.is_float:
        if isinstance(value, bool | int | float | np.integer | np.floating | np.bool_):
            try:
                return float(value)
            except OverflowError:
                raise UserError.at("TW006", f"{what} is a float, which cannot hold {value!r}", span) from None
        raise UserError.at("TW009", f"{what} is a float, got a {type(value).__name__}", span)
    if isinstance(value, float | np.floating):
        raise UserError.at("TW009", f"{what} is {dtype}, got the float {value!r}", span, "convert it: int(...)")
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise UserError.at("TW009", f"{what} is {dtype}, got a {type(value).__name__}", span) from None
    if not dtype.min_value <= number <= dtype.max_value:
        raise CriticalOverflowError.at("TW006", f"{what} is {number}, which does not fit {dtype}", span)
    if number > (1 << 63) - 1:
        raise UserError.at("TW020", f"{what} is {number}: numbers of u64 from 2^63 on cannot be passed from Python", span, "pass it in a tw.State")
    return number


@contextlib.contextmanager
def pinned_to(core: int, span: Span) -> Iterator[None]:
    """The calling thread on one core, meanwhile."""
    if not hasattr(os, "sched_setaffinity"):
        raise DeviceError.at("TW030", "this system pins no threads to cores", span)
    allowed = os.sched_getaffinity(0)
    if core not in allowed:
        raise DeviceError.at("TW030", f"there is no core {core} to pin to: this process may use {', '.join(map(str, sorted(allowed)))}", span, "choose one of these: cpu=")
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


@functools.cache
def _state_reads() -> bool:
    """Whether the address of a state lies where entries look for it."""
    import ctypes

    class Probe(NativeState):
        value: int

    probe = Probe()
    memory = ctypes.c_void_p.from_address(id(probe) + HEADER).value
    return (
        memory == id(probe._memory)
        and ctypes.c_void_p.from_address(id(probe) + TYPE).value == id(Probe)
        and ctypes.c_void_p.from_address((memory or 0) + ARRAY_DATA).value == probe.address
    )


def _require_interpreter(span: Span) -> None:
    if not stubs_work() or not _state_reads():
        raise DeviceError.at("TW030", "critical functions need CPython with its global lock, on a 64-bit machine", span, "use @tw.cpu here")


def _annotations(function: Callable[..., object]) -> dict[str, object]:
    """What annotations mean where the function is marked: names of the functions around it too."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    found: dict[str, object] = {}
    for name, said in getattr(function, "__annotations__", {}).items():
        if not isinstance(said, str):
            found[name] = said
            continue
        with contextlib.suppress(Exception):
            found[name] = eval(said, dict(getattr(function, "__globals__", {})), dict(frame.f_locals))
    return found


def make_critical(
    function: Callable[P, R] | CriticalFunction[P, R], constraints: ExecutionConstraints, overflow: str = "check", optimize: str = ""
) -> CriticalFunction[P, R]:
    """A critical function with these constraints."""
    plain = function.__simt_function__ if isinstance(function, CriticalFunction) else function
    made: Any = CodeFunction.__new__(CodeFunction)
    functools.update_wrapper(made, plain)
    keep_source(plain)
    made.__simt_function__ = plain
    made.constraints = constraints
    made.overflow = overflow
    made.optimize = optimize
    made.annotations = function.annotations if isinstance(function, CriticalFunction) else _annotations(plain)
    found: CriticalFunction[P, R] = made
    return found


@overload
def critical(function: Callable[P, R], /) -> CriticalFunction[P, R]: ...
@overload
def critical(
    *, max_latency_ns: int | None = None, cpu: int | None = None, memory: str = "stack", overflow: str = "check", optimize: str | None = None
) -> Callable[[Callable[P, R]], CriticalFunction[P, R]]: ...
def critical(
    function: Callable[P, R] | None = None, /, *, max_latency_ns: int | None = None, cpu: int | None = None, memory: str = "stack", overflow: str = "check", optimize: str | None = None
) -> CriticalFunction[P, R] | Callable[[Callable[P, R]], CriticalFunction[P, R]]:
    """Mark a function as latency-critical code of the CPU: numbers, fixed arrays and states in, a number or nothing out.

    `max_latency_ns` is a budget that `tw.latency` checks and reports: it is measured, not promised. `cpu` is the core that `tw.latency` measures on and
    `function.pinned()` pins the thread to. `memory="stack"`: arrays of its own (`tw.local`) lie on the stack. `overflow="check"`: a whole number that
    does not fit 64 bits is an `OverflowError`; `"wrap"`: it wraps. `optimize` is a level of optimisation, `"O0"` to `"O3"`, `"Os"` or `"Olatency"`.
    """
    if max_latency_ns is not None and (isinstance(max_latency_ns, bool) or not isinstance(max_latency_ns, int) or max_latency_ns < 1):
        raise UserError.at("TW016", f"max_latency_ns is {max_latency_ns!r}", help="give nanoseconds, from 1 on")
    if cpu is not None and (isinstance(cpu, bool) or not isinstance(cpu, int) or cpu < 0):
        raise UserError.at("TW016", f"cpu is {cpu!r}", help="give the number of a core, from 0 on")
    if memory not in _MEMORIES:
        raise UserError.at("TW016", f"memory is {memory!r}", help="choose 'stack': a critical function has no other memory of its own")
    if overflow not in _OVERFLOWS:
        raise UserError.at("TW016", f"overflow is {overflow!r}", help="choose 'check' or 'wrap'")
    level = levels.checked(optimize, words=tuple(levels.LEVELS))

    def mark(item: Callable[P, R]) -> CriticalFunction[P, R]:
        known = item.constraints if isinstance(item, CriticalFunction) else ExecutionConstraints()
        if not isinstance(item, CriticalFunction) and not hasattr(item, "__code__"):
            raise UserError.at("TW009", f"tw.critical was given a {type(item).__name__}", help="mark a plain function")
        constraints = ExecutionConstraints(
            no_allocation=known.no_allocation, no_syscalls=known.no_syscalls, cpu_affinity=cpu, target_latency_ns=max_latency_ns, critical_path=True
        )
        return make_critical(item, constraints, overflow, level)

    return mark if function is None else mark(function)


critical_path = critical
"""The same under its longer name."""


def _promise(function: Any, name: str) -> Any:
    if not isinstance(function, CriticalFunction) and not hasattr(function, "__code__"):
        raise UserError.at("TW009", f"tw.{name} was given a {type(function).__name__}", help="mark a critical function, or a plain one that becomes one")
    known = function.constraints if isinstance(function, CriticalFunction) else ExecutionConstraints(critical_path=True)
    overflow = function.overflow if isinstance(function, CriticalFunction) else "check"
    level = function.optimize if isinstance(function, CriticalFunction) else ""
    return make_critical(function, replace(known, **{name: True}), overflow, level)


def no_allocation(function: Callable[P, R]) -> CriticalFunction[P, R]:
    """A critical function that allocates no memory. It is proved on the emitted code when it is compiled; what cannot be proved is refused, with the construct and
    its line. The CPython entry around it is apart: a float that is returned to Python is an object."""
    made: CriticalFunction[P, R] = _promise(function, "no_allocation")
    return made


def no_syscalls(function: Callable[P, R]) -> CriticalFunction[P, R]:
    """A critical function that makes no system calls; proved as `no_allocation` is."""
    made: CriticalFunction[P, R] = _promise(function, "no_syscalls")
    return made
