"""SPIR-V -> a program of an OpenCL device, by whichever way its platform has.

In: the device and a module; out: a built program. A device that says it takes SPIR-V (`CL_DEVICE_IL_VERSION`) gets the module itself. One that takes SPIR,
LLVM's older form (`cl_khr_spir`), as PoCL before version 4 does, gets what Khronos' translator `llvm-spirv` makes of the module; the translator must be
of the LLVM that the platform was built with. What the driver makes of it is kept on disk (`runtime/portable/driver_files.py`).
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tilewright.base.errors import CompilerBug, DeviceError
from tilewright.runtime.portable import driver_files
from tilewright.runtime.portable.waits import limit


def takes_spirv(device: Any) -> bool:
    """Whether the device reads SPIR-V itself."""
    try:
        return "SPIR-V" in (device.il_version or "")
    except Exception:  # drivers before OpenCL 2.1 do not know the question
        return False


def translator(device: Any) -> str:
    """The program that makes SPIR of SPIR-V for the device: the name it should have, with the LLVM version of the platform."""
    found = re.search(r"LLVM (\d+)", device.platform.version)
    return f"llvm-spirv-{found.group(1)}" if found else "llvm-spirv"


def refusal(device: Any) -> str:
    """Why the device cannot run SPIR-V; empty where it can."""
    if takes_spirv(device):
        return ""
    if "cl_khr_spir" not in device.extensions.split():
        return f"{device.name.strip()} ({device.platform.name.strip()}) takes neither SPIR-V nor SPIR"
    name = translator(device)
    if shutil.which(name) is None:
        return f"{device.name.strip()} ({device.platform.name.strip()}) takes SPIR but no SPIR-V, and the translator {name} is not installed (Debian: apt install {name})"
    return ""


def build(cl: Any, context: Any, device: Any, code: bytes, label: str, name: str) -> Any:
    """The program of a module, compiled by the driver."""
    reason = refusal(device)
    if reason:
        raise DeviceError.at("TW030", reason)
    driver = " | ".join((device.platform.name, device.platform.version, device.name, device.driver_version, cl.VERSION_TEXT))
    binary = driver_files.kept(driver, code)
    if binary is not None:
        try:
            return cl.Program(context, [device], [binary]).build()
        except cl.Error:  # a driver that no longer takes its own form
            driver_files.forget(driver, code)
    try:
        if takes_spirv(device):
            program = cl._cl._create_program_with_il(context, code).build() if not hasattr(cl.Program, "from_il") else cl.Program(context, code).build()
        else:
            program = cl.Program(context, [device], [_translated(device, code, label, name)]).build(options="-x spir -spir-std=1.2")
    except cl.Error as error:
        raise _rejected(code, label, name, str(error)) from error
    with contextlib.suppress(cl.Error):  # some drivers give none
        (made,) = program.get_info(cl.program_info.BINARIES)
        if made:
            driver_files.keep(driver, code, bytes(made))
    return program


def _translated(device: Any, code: bytes, label: str, name: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="tilewright-") as folder:
        source, target = Path(folder, "module.spv"), Path(folder, "module.bc")
        source.write_bytes(code)
        command = [translator(device), "-r", "--spirv-target-env=CL1.2", str(source), "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit())
        if done.returncode or not target.exists():
            raise _rejected(code, label, name, f"{translator(device)}: {(done.stderr or done.stdout).strip()[:2000]}")
        return target.read_bytes()


def _rejected(code: bytes, label: str, name: str, reason: str) -> CompilerBug:
    with tempfile.NamedTemporaryFile(prefix="tilewright-", suffix=".spv", delete=False) as file:
        file.write(code)
    error = CompilerBug.at("TW040", f"{label} rejects the code of '{name}': {reason}", help=f"please report this; the SPIR-V is in {file.name}")
    assert isinstance(error, CompilerBug)
    return error
