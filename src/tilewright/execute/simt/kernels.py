"""`@tw.gpu`: a Python function becomes an explicit kernel, launched over a grid of blocks of threads.

`kernel[grid, block, shared, stream](…)` and `gpu_launch(kernel, n, block, …)` bind the arguments, choose the device by them, and run:
on a GPU what was compiled for these types, this block and this kind of grid; on the emulator and on the CPU the same thread-stage
kernel. Launches on a GPU return at once unless they have to bring results back into NumPy arrays.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Generic, ParamSpec, overload

from tilewright.base import levels, registry
from tilewright.base.artifact import Artifact
from tilewright.base.errors import DeviceError, UserError, leave, public, public_methods
from tilewright.base.source import Span
from tilewright.base.target import DEFAULT_NVPTX, NVPTX, parse_target
from tilewright.compile.simt import prepare_simt
from tilewright.execute.calls.described import stand_in
from tilewright.execute.calls.index_checks import all_checked, check_flags
from tilewright.execute.devices import Device, default_device, device_of, find_device, when_default_changes
from tilewright.execute.simt.arguments import bind_parameters, read_leaves, split_values
from tilewright.execute.simt.choices import LaunchChoice, checked_choices, choice_texts, with_constants
from tilewright.execute.simt.config import LaunchConfig
from tilewright.execute.simt.launches import Repeats, vendor_of
from tilewright.execute.simt.run import SimtRunner
from tilewright.execute.simt.tuning import call_chosen, configured_choice
from tilewright.frontend.python.sources import keep_source
from tilewright.frontend.simt.kernels import Parameter, read_parameters
from tilewright.frontend.simt.source import FunctionSource, read_source
from tilewright.ir.emulator.warps.stepping import is_stepping
from tilewright.ir.nodes import Attr
from tilewright.ir.program import Program
from tilewright.runtime.core.entry import Entry

P = ParamSpec("P")
Extents = int | tuple[int, ...]
_MOST_LAUNCHES = 1024
"""Configurations of a kernel that are remembered."""


_direct: weakref.WeakSet[ConfiguredKernel] = weakref.WeakSet()
"""Those whose launches go straight to machine code."""


def _leave_direct_ways() -> None:
    """The default device changed: who names no device may run elsewhere now."""
    for known in list(_direct):
        known.leave_direct_way()
    _direct.clear()


when_default_changes(_leave_direct_ways)


@public_methods()
class ConfiguredKernel(Entry):
    """A kernel with its grid and block: what `kernel[grid, block]` gives. Call it with the kernel's arguments."""

    def __init__(self, kernel: GpuKernel[...], config: LaunchConfig) -> None:
        self.kernel, self.config = kernel, config
        self._general_function = self._general
        super().__init__(self._general_function)
        self._repeats = Repeats(kernel.__name__, config.stream is None)
        self._launch: Callable[..., object] | None = None
        """Machine code for launches like those made so far."""

    @public
    def _general(self, *args: object, **named: object) -> None:
        self.kernel.launch(self.config, args, named, self._repeats)
        launch = self._repeats.entry(self._general_function)
        if launch is not None and launch is not self._launch:
            self._launch = launch
            self.enter(launch)
            if self._repeats.by_default:
                _direct.add(self)

    def leave_direct_way(self) -> None:
        """The next launch is looked at again."""
        self._launch, self._repeats.fast, self._repeats.by_default = None, None, False
        self.enter(self._general_function)

    def compile(self, *args: object, target: str = "sm_90a", **named: object) -> Artifact:
        """The artifact for these arguments and this launch: PTX for GPU targets, an object for CPUs."""
        kernel, chosen = self.kernel, parse_target(target)
        values = self._described(args, named)
        leaves, found = read_leaves(kernel.parameters, split_values(kernel.parameters, values), chosen.is_gpu)
        return kernel.runner.compile(leaves, found, self.config, chosen)

    def thread_stage(self, *args: object, target: str = "sm_90a", **named: object) -> Program:
        """The kernel for these arguments and this launch at the thread stage, after all passes."""
        kernel, chosen = self.kernel, parse_target(target)
        values = self._described(args, named)
        _, found = read_leaves(kernel.parameters, split_values(kernel.parameters, values), chosen.is_gpu)
        target_of_warps = chosen if chosen.name in NVPTX else NVPTX[DEFAULT_NVPTX]
        return prepare_simt(kernel.runner.built(found, self.config, vendor=vendor_of(chosen), target=target_of_warps).program, chosen)

    def written(self, *args: object, **named: object) -> frozenset[str]:
        """The arrays that it writes, by the names of their parameters."""
        kernel = self.kernel
        values = self._described(args, named)
        _, found = read_leaves(kernel.parameters, split_values(kernel.parameters, values), False)
        return kernel.runner.built(found, self.config).written

    def _described(self, args: tuple[object, ...], named: dict[str, object]) -> list[object]:
        """Arguments in order; texts such as `"f32[64,*]"` stand for arrays."""
        kernel = self.kernel
        return [stand_in(value) for value in bind_parameters(kernel.__name__, kernel.parameters, args, named, kernel.span)]

    def __repr__(self) -> str:
        return f"<{self.kernel!r} on a grid of {self.config.grid} blocks of {self.config.block} threads>"


@public_methods("__init__", "__call__")
class GpuKernel(Generic[P]):
    """An explicit kernel. `kernel[grid, block](…)` launches it; `grid` and `block` are integers or tuples of up to three."""

    __simt_kernel__ = True

    def __init__(
        self, function: Callable[P, object], device: str | int | None = None, max_threads: int | None = None, min_blocks: int | None = None,
        cluster: int | None = None, check: bool = False, unchecked: bool = False, optimize: str = "", choices: Sequence[LaunchChoice] = (),
    ) -> None:  # fmt: skip
        functools.update_wrapper(self, function)
        keep_source(function)
        self.python = function
        self.device = _device_name(device)
        self.max_threads = _limit("max_threads", max_threads, 1024)
        self.min_blocks = _limit("min_blocks", min_blocks, 32)
        self.cluster = _limit("cluster", cluster, 8) or 1
        self.only_gpu = False
        """Whether launches on the CPU are refused."""
        self.independent = False
        """Whether its threads promise to have nothing to do with each other."""
        check_flags(unchecked, check)
        self.check, self.unchecked = check, unchecked
        self.optimize = levels.checked(optimize)
        self.choices = choice_texts(checked_choices(self.__name__, choices))
        """Ways to launch it, of which a call without a grid takes one, by the texts that stand for them."""
        self.constants: Mapping[str, object] = {}
        """Names that are constants, where this is the kernel of one of the choices."""
        self._chosen: dict[str, GpuKernel[...]] = {}
        self._launches: dict[object, ConfiguredKernel] = {}
        self._runner: SimtRunner | None = None

    # -- the source -----------------------------------------------------------------------------------------------

    @functools.cached_property
    def source(self) -> FunctionSource:
        source = read_source(self.python)
        return with_constants(source, self.constants) if self.constants else source

    @functools.cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        return read_parameters(self.source)

    @functools.cached_property
    def span(self) -> Span:
        return self.source.head()

    @property
    def runner(self) -> SimtRunner:
        if self._runner is None:
            attrs: dict[str, Attr] = {} if self.min_blocks is None else {"min_blocks": self.min_blocks}
            attrs |= {"cluster": self.cluster} if self.cluster > 1 else {}
            attrs |= {"optimize": self.optimize} if self.optimize else {}
            self._runner = SimtRunner(self.python, self.source, self.parameters, attrs, self.independent)
        return self._runner

    @property
    def last(self) -> Artifact | None:
        """What the latest launch ran."""
        return self.runner.last

    # -- launching ------------------------------------------------------------------------------------------------

    def __call__(self, *args: object, **named: object) -> None:
        name = self.__name__
        if self.choices:
            call_chosen(self, args, dict(named))
            return
        raise UserError.at(
            "TW016", f"{name} is a GPU kernel and needs a grid and a block", self.span, f"launch it with {name}[grid, block](...) or tw.gpu_launch({name}, n, block, ...)"
        )  # fmt: skip

    def __getitem__(self, item: object) -> ConfiguredKernel:
        try:
            try:
                found = self._launches.get(item)
            except TypeError:
                found = None  # a list, say: the check below says what is wrong
            return found if found is not None else self._configured(item, self._config(item))
        except UserError as error:
            leave(error)
            raise

    def _configured(self, key: object, config: LaunchConfig) -> ConfiguredKernel:
        made = ConfiguredKernel(self, config)
        if len(self._launches) >= _MOST_LAUNCHES:
            self._launches.clear()
        self._launches[key] = made
        return made

    def _config(self, item: object) -> LaunchConfig:
        parts = item if isinstance(item, tuple) else (item,)
        if not 2 <= len(parts) <= 4:
            raise UserError.at(
                "TW016", f"{self.__name__}[...] takes a grid and a block, then bytes of shared memory and a stream; got {len(parts)} item(s)",
                self.span, f"for instance {self.__name__}[blocks, threads]",
            )  # fmt: skip
        shared = parts[2] if len(parts) > 2 else 0
        if shared is None:
            shared = 0
        if isinstance(shared, bool) or not isinstance(shared, int) or shared < 0:
            raise UserError.at(
                "TW009", f"the dynamic shared memory of {self.__name__} is {shared!r}, not a number of bytes", self.span
            )
        grid = _extents(parts[0], "grid", self.__name__, self.span)
        block = self._checked_block(parts[1])
        if grid[0] % self.cluster:
            raise UserError.at(
                "TW009",
                f"the grid of {self.__name__} is {parts[0]!r}: its blocks along x are not made of clusters of {self.cluster}",
                self.span,
            )
        return LaunchConfig(grid, block, shared, parts[3] if len(parts) > 3 else None, check=self.check)

    def _checked_block(self, block: object) -> tuple[int, int, int]:
        found = _extents(block, "block", self.__name__, self.span)
        threads = found[0] * found[1] * found[2]
        if not threads:
            raise UserError.at(
                "TW009", f"the block of {self.__name__} is {block!r}", self.span, "a block has at least one thread"
            )
        most = self.max_threads or 1024
        if threads > most:
            limit = "its max_threads is" if self.max_threads else "a GPU allows"
            raise UserError.at(
                "TW020", f"the block of {self.__name__} is {block!r}: {threads} threads; {limit} {most}", self.span
            )
        return found

    def over(self, n: object, block: object, shared: int = 0, stream: object = None) -> ConfiguredKernel:
        """A launch for `n` threads: as many blocks as it takes; threads beyond do nothing."""
        key = ("over", n, block, shared, stream)
        try:
            found = self._launches.get(key)
        except TypeError:
            found = None
        if found is not None:
            return found
        if isinstance(n, bool) or not isinstance(n, int) or n < 0:
            raise UserError.at(
                "TW009", f"{self.__name__} is launched for {n!r} threads", self.span, "give the number of elements"
            )
        shape = self._checked_block(block)
        config = self._config((-(-n // (shape[0] * shape[1] * shape[2])), block, shared, stream))
        return self._configured(key, replace(config, count=n if n % config.threads else 0))

    def choice(self, text: str) -> GpuKernel[...]:
        """The kernel that one of the choices launches: with its constants."""
        made = self._chosen.get(text)
        if made is None:
            launch = self.choices[text]
            if launch.constants and hasattr(self.python, "__simt_alternatives__"):
                raise UserError.at("TW016", f"{self.__name__} has several definitions, and choices with constants", self.span, "give each its own name")
            wanted = self.min_blocks if launch.min_blocks is None else launch.min_blocks
            made = GpuKernel(self.python, self.device, self.max_threads, wanted, self.cluster, self.check, self.unchecked, self.optimize)
            made.only_gpu, made.independent, made.constants = self.only_gpu, self.independent, launch.constants
            self._chosen[text] = made
        return made

    def chosen(self, *args: object, device: str | None = None, **named: object) -> ConfiguredKernel:
        """What a call with these arguments launches: the fastest choice by the tuning table, else the first."""
        if not self.choices:
            raise UserError.at("TW016", f"{self.__name__} has no choices", self.span, "give @tw.gpu(choices=[tw.LaunchChoice(...)])")
        made = configured_choice(self, args, named, device)
        assert isinstance(made, ConfiguredKernel)
        return made

    def launch(self, config: LaunchConfig, args: tuple[object, ...], named: dict[str, object], repeats: Repeats | None = None) -> None:
        """One launch. `repeats` learns from it what the next ones need not look at."""
        asked = named.pop("device", None) if all(p.name != "device" for p in self.parameters) else None
        asked_check = named.pop("check") if "check" in named and all(p.name != "check" for p in self.parameters) else None
        values = bind_parameters(self.__name__, self.parameters, args, named, self.span)
        flat = values if self.runner.plain else [part.value for part in split_values(self.parameters, values)]
        device = self.choose_device(flat, asked)
        if device.kind == "cpu" and (asked is not None or asked_check is not None):
            repeats = None  # this launch says nothing of others
        if asked_check is not None:
            config = replace(config, check=_flag("check", asked_check))
        elif not config.check and (all_checked() or not (self.unchecked or device.target.is_gpu)):
            config = replace(config, check=True, asserts=True)
        if config.stream is None:
            self.runner.run(values, config, device, repeats)
            return
        from tilewright.execute.streams import Stream

        with Stream.of(config.stream, device.id):
            self.runner.run(values, config, device, repeats)

    def choose_device(self, values: list[object], asked: object = None) -> Device:
        """The device of a launch: the one asked for, the kernel's, that of the arrays, the default one, a GPU if there is one."""
        if asked is not None and not isinstance(asked, str | Device):
            raise UserError.at("TW009", f"device= is a {type(asked).__name__}, not a name such as {registry.examples()}", self.span)
        default = default_device()
        if is_stepping(self.__name__):
            return find_device("emulator")
        found = find_device(asked or self.device or device_of(values) or ("auto" if default == "cpu" else default))
        if self.only_gpu and not found.target.is_gpu:
            raise DeviceError.at(
                "TW030", f"{self.__name__} is marked @tw.gpu_compute, and the launch would run on '{found.id}'", self.span,
                "launch it where there is a GPU, or with device='emulator'",
            )  # fmt: skip
        return found

    def __reduce__(self) -> str:
        return self.__qualname__

    def __repr__(self) -> str:
        return f"<GPU kernel {self.__name__}({', '.join(p.name for p in self.parameters)})>"

    __name__: str
    __qualname__: str


def _device_name(device: str | int | None) -> str | None:
    if isinstance(device, bool) or not isinstance(device, str | int | None):
        raise UserError.at(
            "TW009", f"device is {device!r}", help=f"give a name such as '{registry.accelerator()}:1' or 'emulator', or the number of a GPU"
        )
    return f"{registry.accelerator()}:{device}" if isinstance(device, int) else device


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise UserError.at("TW009", f"{name} is {value!r}", help="give True or False")
    return value


def _limit(name: str, value: int | None, most: int) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most):
        raise UserError.at("TW016", f"{name} is {value!r}", help=f"give a number from 1 to {most}")
    return value


def _extents(item: object, what: str, name: str, span: Span) -> tuple[int, int, int]:
    parts = item if isinstance(item, tuple) else (item,)
    if not 1 <= len(parts) <= 3 or any(isinstance(p, bool) or not hasattr(p, "__index__") or p.__index__() < 0 for p in parts):
        raise UserError.at("TW009", f"the {what} of {name} is {item!r}", span, "give an integer or up to three of them")
    x, y, z = (*(int(p.__index__()) for p in parts), 1, 1)[:3]
    return x, y, z


@overload
def gpu(
    function: Callable[P, object], *, device: str | int | None = None, max_threads: int | None = None, min_blocks: int | None = None,
    cluster: int | None = None, check: bool = False, unchecked: bool = False, optimize: str = "", choices: Sequence[LaunchChoice] = (),
) -> GpuKernel[P]: ...  # fmt: skip
@overload
def gpu(
    *, device: str | int | None = None, max_threads: int | None = None, min_blocks: int | None = None, cluster: int | None = None,
    check: bool = False, unchecked: bool = False, optimize: str = "", choices: Sequence[LaunchChoice] = (),
) -> Callable[[Callable[P, object]], GpuKernel[P]]: ...  # fmt: skip
def gpu(
    function: Callable[P, object] | None = None, *, device: str | int | None = None, max_threads: int | None = None,
    min_blocks: int | None = None, cluster: int | None = None, check: bool = False, unchecked: bool = False, optimize: str = "",
    choices: Sequence[LaunchChoice] = (),
) -> GpuKernel[P] | Callable[[Callable[P, object]], GpuKernel[P]]:  # fmt: skip
    """Mark a Python function as an explicit kernel: its body is what one thread does.

    `device` names where it runs (`"cuda:1"`, `"emulator"`, `"cpu"`, or the number of a GPU); otherwise its arrays decide. `max_threads`
    is the largest block it may be launched with, `min_blocks` how many blocks a multiprocessor should have room for: both limit the
    registers of a thread. `cluster`: so many neighbouring blocks along x run at once and reach each other's shared memory. With
    `check=True`, also at a single launch, every index is checked on the device, and a launch ends with the error the emulator would give. On a
    CPU that is so anyway, unless it is `unchecked=True`. `optimize` is the level of its machine code: `O0` to `O3`, `Os`, `Olatency` or `tiered`; on a GPU
    only `O0` and `O1` make other code. With `choices`, ways to launch it, it may be called without a grid: `tw.tune` measures which is fastest.
    """
    if function is not None and not callable(function):
        raise UserError.at("TW009", f"tw.gpu was given a {type(function).__name__}", help="give a function, or write @tw.gpu above one")
    if function is not None:
        return GpuKernel(function, device, max_threads, min_blocks, cluster, check, unchecked, optimize, choices)
    return lambda wrapped: GpuKernel(wrapped, device, max_threads, min_blocks, cluster, check, unchecked, optimize, choices)


def gpu_launch(
    kernel: GpuKernel[...], n: int, block: Extents, *args: object, shared: int = 0, stream: object = None, **named: object
) -> None:
    """LaunchChoice a kernel for `n` threads in blocks of `block`. Threads whose `gpu_thread_id()` is `n` or more do nothing."""
    if not isinstance(kernel, GpuKernel):
        raise UserError.at("TW009", f"gpu_launch was given a {type(kernel).__name__}", help="mark the function with @tw.gpu")
    kernel.over(n, block, shared, stream)(*args, **named)
