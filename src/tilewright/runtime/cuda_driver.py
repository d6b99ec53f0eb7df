"""NVIDIA's driver API as checked calls. In: the name of a driver function and its arguments; out: its results.

Every other module reaches the driver through a `Driver`. It wraps the module `cuda.bindings.driver` (or anything with the same
functions, which is how tests run without a GPU), and turns a failed call into a `DeviceError` that says which function failed,
with which code, what that code means, where, and, for faults of a kernel that surface later, which kernels could have caused it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from types import ModuleType, SimpleNamespace
from typing import SupportsInt

from tilewright.base.errors import DeviceError, TilewrightError

OUT_OF_MEMORY = 2
NOT_INITIALIZED = 3
KERNEL_FAULTS = frozenset({214, 700, 702, 710, 714, 715, 716, 717, 718, 719})
"""Codes a running kernel causes. The call that returns one is often innocent, and the context is lost."""

Results = tuple[SupportsInt, ...]


class Driver:
    """Checked access to the functions of a driver module. Holds no state of its own."""

    def __init__(self, module: ModuleType | SimpleNamespace) -> None:
        self.module = module

    def attempt(self, api: str, *arguments: object) -> tuple[int, Results]:
        """Call `api`; its status (0 is success) and its other results."""
        results = getattr(self.module, api)(*arguments)
        return int(results[0]), results[1:]

    def call(self, api: str, *arguments: object, where: str = "") -> Results:
        """Call `api`; its results, or a DeviceError."""
        status, results = self.attempt(api, *arguments)
        if status:
            raise self.error(api, status, where)
        return results

    def constant(self, enumeration: str, name: str) -> object:
        """A member of one of the driver's enumerations, e.g. `CUjit_option.CU_JIT_ERROR_LOG_BUFFER`."""
        return getattr(getattr(self.module, enumeration), name)

    def address(self, api: str) -> int:
        """Where the native function is in this process, for host code that calls it directly."""
        flags = self.constant("CUdriverProcAddress_flags", "CU_GET_PROC_ADDRESS_DEFAULT")
        (version,) = self.call("cuDriverGetVersion")
        return int(self.call("cuGetProcAddress", api.encode(), int(version), flags)[0])

    def describe(self, status: int) -> tuple[str, str]:
        """The code's name and what it means, in the driver's words."""
        try:
            code = self.module.CUresult(status)
        except ValueError:  # a driver newer than the bindings
            return f"unknown code {status}", "the installed CUDA bindings do not know this code"
        words = []
        for api in ("cuGetErrorName", "cuGetErrorString"):
            failed, results = self.attempt(api, code)
            value = results[0] if not failed else None
            words.append(value.decode(errors="replace") if isinstance(value, bytes) else f"unknown code {status}")
        return words[0], words[1]

    def error(self, api: str, status: int, where: str = "", kernels: Iterable[str] = ()) -> TilewrightError:
        """The error for a failed call; raises nothing. `kernels` are those that may have caused a fault."""
        name, meaning = self.describe(status)
        message = f"{api} failed with {name} ({status}): {meaning}"
        if where:
            message += f", on {where}"
        help_text = ""
        if status in KERNEL_FAULTS:
            listed = ", ".join(dict.fromkeys(kernels))
            message += f"; kernels launched since the last synchronisation: {listed or 'none by Tilewright'}"
            help_text = "the device's context is lost and this process must be restarted; run the kernel on the emulator to find the fault"
        elif status == NOT_INITIALIZED:
            help_text = "CUDA cannot be used in a forked child of a process that used it; start children with 'spawn'"
        return DeviceError.at("TW032", message, help=help_text)


def load_driver() -> Driver:
    """The initialised driver of this machine. Raises DeviceError TW030 with the reason when there is none."""
    try:
        from cuda.bindings import driver as module
    except ImportError as error:
        raise DeviceError.at(
            "TW030", f"the CUDA bindings cannot be imported: {error}", help="pip install 'tilewright[cuda]'"
        ) from error
    driver = Driver(module)
    try:
        status, _ = driver.attempt("cuInit", 0)
    except (OSError, RuntimeError, ImportError) as error:
        raise DeviceError.at(
            "TW030", f"no NVIDIA driver was found: {error}", help="install the NVIDIA driver, or choose target 'cpu'"
        ) from error
    if status:
        name, meaning = driver.describe(status)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hint = f" (CUDA_VISIBLE_DEVICES is '{visible}')" if visible is not None else ""
        raise DeviceError.at("TW030", f"the NVIDIA driver does not start: cuInit gave {name} ({status}): {meaning}{hint}")
    return driver
