"""LLVM's functions, straight from llvmlite's shared library.

In: names, text, numbers. Out: handles, text, bytes. `llvmlite.binding` offers the same functions, but its import also reads a builder of IR,
zip files and hundreds of prototypes that nobody here needs, and takes longer than LLVM does with a small kernel. The versions of llvmlite that
`pyproject.toml` allows have these functions as the table says.

Nothing here takes llvmlite's lock: modules have contexts of their own, and whoever calls takes turns with a target machine.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import sys
from typing import Any

_TYPES: dict[str, Any] = {
    "-": None, "p": ctypes.c_void_p, "s": ctypes.c_char_p, "i": ctypes.c_int, "b": ctypes.c_bool, "z": ctypes.c_size_t, "q": ctypes.c_uint64,
    "o": ctypes.POINTER(ctypes.c_char_p),
}  # fmt: skip

_PROTOTYPES = {
    "AddSymbol": "-sp",
    "ContextCreate": "p",
    "ContextDispose": "-p",
    "CopyStringRepOfTargetData": "-po",
    "CreateMCJITCompiler": "pppbo",
    "CreateObjectFile": "psz",
    "CreatePassBuilder": "ppp",
    "CreatePipelineTuningOptions": "p",
    "CreateTargetMachine": "ppsssissiis",
    "CreateTargetMachineData": "pp",
    "DisposeExecutionEngine": "-p",
    "DisposeFunctionsIter": "-p",
    "DisposeMemoryBuffer": "-p",
    "DisposeModule": "-p",
    "DisposeNewFunctionPassManger": "-p",
    "DisposeNewModulePassManger": "-p",
    "DisposeObjectFile": "-p",
    "DisposePassBuilder": "-p",
    "DisposePipelineTuningOptions": "-p",
    "DisposeString": "-s",
    "DisposeTargetData": "-p",
    "FinalizeObject": "-p",
    "FunctionsIterNext": "pp",
    "GetBufferSize": "zp",
    "GetBufferStart": "pp",
    "GetDefaultTargetTriple": "-o",
    "GetFunctionAddress": "qps",
    "GetGlobalValueAddress": "qps",
    "GetHostCPUFeatures": "io",
    "GetHostCPUName": "-o",
    "GetProcessTriple": "-o",
    "GetTargetFromTriple": "pso",
    "InitializeAllAsmPrinters": "-",
    "InitializeAllTargetInfos": "-",
    "InitializeAllTargetMCs": "-",
    "InitializeAllTargets": "-",
    "InitializeNativeAsmParser": "-",
    "InitializeNativeAsmPrinter": "-",
    "InitializeNativeTarget": "-",
    "IsDeclaration": "ip",
    "MCJITAddObjectFile": "-pp",
    "ModuleFunctionsIter": "pp",
    "PTOSetLoopInterleaving": "-pb",
    "PTOSetLoopUnrolling": "-pb",
    "PTOSetLoopVectorization": "-pb",
    "PTOSetSLPVectorization": "-pb",
    "ParseAssembly": "ppso",
    "PrintModuleToString": "-po",
    "RunNewFunctionPassManager": "-ppp",
    "RunNewModulePassManager": "-ppp",
    "SetCommandLine": "-ss",
    "TargetMachineEmitToMemory": "pppio",
    "VerifyModule": "bpo",
    "buildFunctionSimplificationPipeline": "ppi",
    "buildPerModuleDefaultPipeline": "ppi",
}
"""The result and the arguments of each function that is called: nothing, pointer, text, int, bool, size, 64 bits, text that comes back."""


@functools.cache
def library_path() -> str:
    """Where the library is, found without the import of the package that it belongs to."""
    package = importlib.util.find_spec("llvmlite")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'llvmlite'", name="llvmlite")
    name = "llvmlite.dll" if os.name == "nt" else "libllvmlite.dylib" if sys.platform == "darwin" else "libllvmlite.so"
    return os.path.join(package.submodule_search_locations[0], "binding", name)


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(library_path())


@functools.cache
def _function(name: str) -> Any:
    function = getattr(_library(), "LLVMPY_" + name)
    types = [_TYPES[letter] for letter in _PROTOTYPES[name]]
    function.restype, function.argtypes = types[0], types[1:]
    return function


def call(name: str, *arguments: Any) -> Any:
    """What LLVM's function `name` returns; text goes in as `str`."""
    return _function(name)(*(a.encode() if isinstance(a, str) else a for a in arguments))


def call_for_text(name: str, *arguments: Any) -> tuple[Any, str]:
    """What the function returns, and the text it leaves in its last argument."""
    held = ctypes.c_char_p()
    result = call(name, *arguments, ctypes.byref(held))
    if held.value is None:
        return result, ""
    text = held.value.decode("utf-8", "replace")
    call("DisposeString", held)
    return result, text


def call_or_raise(name: str, *arguments: Any) -> int:
    """The handle that the function returns; a RuntimeError with LLVM's own words where there is none."""
    handle, problem = call_for_text(name, *arguments)
    if not handle:
        raise RuntimeError(problem)
    return int(handle)


def host_features() -> dict[str, bool]:
    """What the CPU we run on can do, by LLVM's names, sorted."""
    _, text = call_for_text("GetHostCPUFeatures")
    return {feature[1:]: feature[0] == "+" for feature in sorted(text.split(","), key=lambda word: word[1:]) if feature}


def host_name() -> str:
    """LLVM's name of the CPU we run on."""
    return call_for_text("GetHostCPUName")[1]


@functools.cache
def process_triple() -> str:
    """The triple of code for this process."""
    return call_for_text("GetProcessTriple")[1]


@functools.cache
def initialise(native: bool) -> None:
    """Make the code generator of this machine known, or those of all."""
    # LLVM's reader checks modules that have line numbers by itself, and ends the process where they are wrong; we check all of them.
    call("SetCommandLine", "tilewright", "-disable-auto-upgrade-debug-info")
    if native:
        call("InitializeNativeTarget")
        call("InitializeNativeAsmPrinter")
    else:
        for what in ("TargetInfos", "Targets", "TargetMCs", "AsmPrinters"):
            call("InitializeAll" + what)
    call("InitializeNativeAsmParser")


class TargetMachine:
    """A target machine. It serves one compilation at a time, and lives as long as the process, or the engine it is given to."""

    def __init__(self, triple: str, cpu: str = "", features: str = "", opt: int = 2, code_model: str = "small") -> None:
        initialise(triple == process_triple())
        target = call_or_raise("GetTargetFromTriple", triple)
        self.handle = call("CreateTargetMachine", target, triple, cpu, features, opt, "pic", code_model, 0, 0, "")
        if not self.handle:
            raise RuntimeError("Cannot create target machine")

    def data_layout(self) -> str:
        """Its `target datalayout`."""
        layout = call("CreateTargetMachineData", self.handle)
        _, text = call_for_text("CopyStringRepOfTargetData", layout)
        call("DisposeTargetData", layout)
        return text

    def emit(self, module: LlvmModule, as_object: bool) -> bytes:
        """The module as an object, or as assembly."""
        buffer = call_or_raise("TargetMachineEmitToMemory", self.handle, module.handle, int(as_object))
        try:
            return ctypes.string_at(call("GetBufferStart", buffer), call("GetBufferSize", buffer))
        finally:
            call("DisposeMemoryBuffer", buffer)


class LlvmModule:
    """LLVM's module of some text, in a context of its own. Text that is no legal module raises RuntimeError with LLVM's own words."""

    def __init__(self, text: str) -> None:
        self.context = call("ContextCreate")
        self.handle, problem = call_for_text("ParseAssembly", self.context, text)
        if not problem:
            wrong, problem = call_for_text("VerifyModule", self.handle)
            if not wrong:
                return
        self.close()
        raise RuntimeError(problem)

    def optimise(self, machine: TargetMachine, level: int, unroll: bool, whole: bool) -> None:
        """Run LLVM's own pipeline of that level, without its vectorisers: all of it, or only what simplifies functions one by one."""
        options = call("CreatePipelineTuningOptions")
        for what in ("LoopVectorization", "LoopInterleaving", "SLPVectorization"):
            call("PTOSet" + what, options, False)
        call("PTOSetLoopUnrolling", options, unroll)
        builder = call("CreatePassBuilder", machine.handle, options)
        if whole:
            manager = call("buildPerModuleDefaultPipeline", builder, level)
            call("RunNewModulePassManager", manager, self.handle, builder)
            call("DisposeNewModulePassManger", manager)
        else:
            manager = call("buildFunctionSimplificationPipeline", builder, level)
            for function in self._functions():
                call("RunNewFunctionPassManager", manager, function, builder)
            call("DisposeNewFunctionPassManger", manager)
        call("DisposePassBuilder", builder)
        call("DisposePipelineTuningOptions", options)

    def _functions(self) -> list[int]:
        """Those that have a body."""
        found: list[int] = []
        iterator = call("ModuleFunctionsIter", self.handle)
        while function := call("FunctionsIterNext", iterator):
            if not call("IsDeclaration", function):
                found.append(function)
        call("DisposeFunctionsIter", iterator)
        return found

    def __str__(self) -> str:
        return call_for_text("PrintModuleToString", self.handle)[1]

    def close(self) -> None:
        """Free the module and its context."""
        if self.handle:
            call("DisposeModule", self.handle)
        call("ContextDispose", self.context)
