"""Object code in memory: relocatable objects in, callable addresses out.

In: objects for this machine and the symbols they name. Out: addresses of their functions, valid as long as the `ObjectCode` lives.
Objects of one `ObjectCode` see each other's symbols; what is left is looked up among the symbols bound here, then in the process.
LLVM ends the process when a symbol cannot be found, so objects come only from our own code generators.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from tilewright.base import abi
from tilewright.base.forks import at_work, fork_safe_lock
from tilewright.base.headroom import LOAD_BYTES, require_room

stop_word = ctypes.c_int32()
"""Not 0 while CPU kernels are asked to leave."""

# Serialises engine creation; LLVM's own lock covers single calls only.
_loading = fork_safe_lock()


@functools.cache
def _llvm() -> Any:
    """LLVM, loaded when there is something to run."""
    import llvmlite.binding as llvm

    return llvm


@functools.cache
def _initialise() -> None:
    _llvm().initialize_native_target()
    _llvm().initialize_native_asmprinter()
    bind_symbol(abi.STOP, ctypes.addressof(stop_word))


def bind_symbol(name: str, address: int) -> None:
    """Make `name` mean `address` for objects loaded from now on. The caller keeps what is there alive."""
    _llvm().add_symbol(name, address)


class ObjectCode:
    """Some objects, linked and executable."""

    def __init__(self, *objects: bytes) -> None:
        require_room(LOAD_BYTES, "load compiled code")
        with at_work(), _loading:
            _initialise()
            llvm = _llvm()
            machine = llvm.Target.from_default_triple().create_target_machine(reloc="pic", codemodel="small")
            # llvmlite's memory manager keeps the sections of an object within reach of each other.
            self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine, use_lmm=True)
            for data in objects:
                self._engine.add_object_file(llvm.ObjectFileRef.from_data(data))
            self._engine.finalize_object()

    def data(self, name: str) -> int:
        """Where the variable `name` is."""
        found = int(self._engine.get_global_value_address(name))
        assert found, name
        return found

    def address(self, name: str) -> int:
        """Where the function `name` is."""
        found = int(self._engine.get_function_address(name))
        assert found, name
        return found
