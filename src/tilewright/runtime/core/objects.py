"""Object code in memory: relocatable objects in, callable addresses out.

In: objects for this machine and the symbols they name. Out: addresses of their functions, valid as long as the `ObjectCode` lives.
Objects of one `ObjectCode` see each other's symbols; what is left is looked up among the symbols bound here, then in the process.
LLVM ends the process when a symbol cannot be found, so objects come only from our own code generators.
"""

from __future__ import annotations

import ctypes
import functools
import sys

from tilewright.base import abi
from tilewright.base.errors import CompilerBug
from tilewright.base.forks import at_work, fork_safe_lock
from tilewright.base.headroom import LOAD_BYTES, require_room
from tilewright.base.llvm_library import LlvmModule, TargetMachine, call, call_for_text, call_or_raise, initialise
from tilewright.runtime.core import machine_code

stop_word = ctypes.c_int32()
"""Not 0 while CPU kernels are asked to leave."""

_NEEDS_MEMORY = abi.GIVE.encode()

# Serialises engine creation.
_loading = fork_safe_lock()
_providing = fork_safe_lock()
_spare_memory: ObjectCode | None = None


@functools.cache
def _initialise() -> None:
    initialise(native=True)
    bind_symbol(abi.STOP, ctypes.addressof(stop_word))


def bind_symbol(name: str, address: int) -> None:
    """Make `name` mean `address` for objects loaded from now on. The caller keeps what is there alive."""
    call("AddSymbol", name, address)


def _provide_memory() -> None:
    """Load what CPU programs get memory from, with the first of them that needs any."""
    global _spare_memory
    if _spare_memory is None:
        with _providing:
            if _spare_memory is None:
                build = machine_code.builder("spare memory")
                if build is None:
                    raise CompilerBug.at("TW040", "no code that hands out memory was provided before loading a program")
                code = ObjectCode(build())
                bind_symbol(abi.TAKE, code.address("spare_take"))
                bind_symbol(abi.GIVE, code.address("spare_give"))
                _spare_memory = code


class ObjectCode:
    """Some objects, linked and executable."""

    def __init__(self, *objects: bytes) -> None:
        if any(_NEEDS_MEMORY in data for data in objects):
            _provide_memory()
        require_room(LOAD_BYTES, "load compiled code")
        self._engine = 0
        with at_work(), _loading:
            _initialise()
            machine = TargetMachine(call_for_text("GetDefaultTargetTriple")[1])
            self._module = LlvmModule("")
            # llvmlite's memory manager keeps the sections of an object within reach of each other. The engine owns the module and the machine.
            self._engine = call_or_raise("CreateMCJITCompiler", self._module.handle, machine.handle, True)
            for data in objects:
                held = call("CreateObjectFile", data, len(data))
                call("MCJITAddObjectFile", self._engine, held)
                call("DisposeObjectFile", held)
            call("FinalizeObject", self._engine)

    def __del__(self) -> None:
        if self._engine and not sys.is_finalizing():
            call("DisposeExecutionEngine", self._engine)
            self._module.handle = 0
            self._module.close()

    def data(self, name: str) -> int:
        """Where the variable `name` is."""
        found = int(call("GetGlobalValueAddress", self._engine, name))
        assert found, name
        return found

    def address(self, name: str) -> int:
        """Where the function `name` is."""
        found = int(call("GetFunctionAddress", self._engine, name))
        assert found, name
        return found
