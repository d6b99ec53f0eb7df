"""NVIDIA's driver API as checked calls. In: the name of a driver function and its arguments; out: its results.

Every other module reaches the driver through a `Driver`. It wraps the module `cuda.bindings.driver` (or anything with the same
functions, which is how tests run without a GPU), and turns a failed call into a `DeviceError` that says which function failed,
with which code, what that code means, where, and, for faults of a kernel that surface later, which kernels could have caused it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cached_property
from types import ModuleType, SimpleNamespace
from typing import SupportsInt

from tilewright.base.errors import DeviceError, TilewrightError

OUT_OF_MEMORY = 2
NOT_INITIALIZED = 3
UNAVAILABLE = 46
NO_DEVICE = 100
UNSUPPORTED_PTX = 222
KERNEL_FAULTS = frozenset({214, 700, 702, 710, 714, 715, 716, 717, 718, 719})
"""Codes a running kernel causes. The call that returns one is often innocent, and the context is lost."""

TAKEN_FROM = {
    70: (11, 0), 71: (11, 1), 72: (11, 2), 73: (11, 3), 74: (11, 4), 75: (11, 5), 76: (11, 6), 77: (11, 7), 78: (11, 8), 80: (12, 0),
    81: (12, 1), 82: (12, 2), 83: (12, 3), 84: (12, 4), 85: (12, 5), 86: (12, 7), 87: (12, 8), 88: (12, 9), 90: (13, 0),
}  # fmt: skip
"""The CUDA version of the first driver that takes each version of PTX, which is times ten."""

Results = tuple[SupportsInt, ...]


class Driver:
    """Checked access to the functions of a driver module."""

    def __init__(self, module: ModuleType | SimpleNamespace) -> None:
        self.module = module
        self.process = os.getpid()
        """A driver works in the process that started it, not in those forked from it."""

    def attempt(self, api: str, *arguments: object) -> tuple[int, Results]:
        """Call `api`; its status (0 is success) and its other results."""
        try:
            results = getattr(self.module, api)(*arguments)
        except AttributeError as error:
            raise DeviceError.at(
                "TW030", f"the installed CUDA bindings have no {api}: {error}", help="pip install --upgrade 'tilewright[cuda]'"
            ) from error
        except RuntimeError as error:  # the bindings' word for a function the driver's library lacks
            raise DeviceError.at(
                "TW030", f"the NVIDIA driver, of CUDA {self.version_text}, has no {api}: {error}", help="update the NVIDIA driver"
            ) from error
        return int(results[0]), results[1:]

    @cached_property
    def version(self) -> tuple[int, int]:
        """The newest CUDA version the driver knows."""
        number = int(self.module.cuDriverGetVersion()[1] or 0)
        return number // 1000, number % 1000 // 10

    @property
    def version_text(self) -> str:
        return "{}.{}".format(*self.version)

    def check_ptx(self, ptx: int, label: str) -> None:
        """Refuse a driver that does not take this version of PTX (times ten)."""
        wanted = TAKEN_FROM.get(ptx)
        if wanted is not None and self.version < wanted:
            raise self.too_old(ptx, label)

    def too_old(self, ptx: int, label: str) -> TilewrightError:
        """The error for code that is newer than the driver."""
        wanted = TAKEN_FROM.get(ptx)
        since = f", which drivers take from CUDA {wanted[0]}.{wanted[1]} on" if wanted else ""
        return DeviceError.at(
            "TW030",
            f"the NVIDIA driver is too old for {label}: code for it is PTX {ptx // 10}.{ptx % 10}{since}, and this driver is of CUDA {self.version_text}",
            help="update the NVIDIA driver (nvidia-smi shows its version), or use device='cpu'",
        )

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
        if status == NOT_INITIALIZED and os.getpid() != self.process:
            return forked(where or "CUDA")
        name, meaning = self.describe(status)
        message = f"{api} failed with {name} ({status}): {meaning}"
        if where:
            message += f", on {where}"
        help_text = ""
        if status in KERNEL_FAULTS:
            listed = ", ".join(dict.fromkeys(kernels))
            message += f"; kernels launched since the last synchronisation: {listed or 'none by Tilewright'}"
            help_text = (
                "the device is lost to this process, which can go on with device='cpu'; run the kernel on the emulator to find the fault"
            )
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
        status = int(module.cuInit(0)[0])
    except (OSError, RuntimeError, ImportError) as error:
        raise DeviceError.at(
            "TW030", f"no NVIDIA driver was found: {error}", help="install the NVIDIA driver, or choose target 'cpu'"
        ) from error
    if status == NOT_INITIALIZED:
        # The one way to this code from cuInit.
        raise forked("CUDA")
    if status == NO_DEVICE:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hint = f": CUDA_VISIBLE_DEVICES is '{visible}'" if visible is not None else ""
        raise DeviceError.at("TW030", f"the NVIDIA driver reports no device{hint}")
    if status:
        name, meaning = driver.describe(status)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hint = f" (CUDA_VISIBLE_DEVICES is '{visible}')" if visible is not None else ""
        raise DeviceError.at("TW030", f"the NVIDIA driver does not start: cuInit gave {name} ({status}): {meaning}{hint}")
    return driver


def forked(label: str) -> TilewrightError:
    """The error for a child that was forked after its parent used CUDA."""
    return DeviceError.at(
        "TW030", f"{label} cannot be used in process {os.getpid()}, which was forked from one that used CUDA",
        help="start processes with multiprocessing's 'spawn', or fork before the first use of a GPU; the CPU can be used",
    )  # fmt: skip
