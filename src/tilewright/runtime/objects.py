"""Object code in memory: relocatable objects in, callable addresses out.

In: objects for this machine and the symbols they name. Out: addresses of their functions, valid as long as the `ObjectCode` lives.
Objects of one `ObjectCode` see each other's symbols; what is left is looked up among the symbols bound here, then in the process.
LLVM ends the process when a symbol cannot be found, so objects come only from our own code generators.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

# Serialises engine creation; LLVM's own lock covers single calls only.
_loading = threading.Lock()


@functools.cache
def _llvm() -> Any:
    """LLVM, loaded when there is something to run."""
    import llvmlite.binding as llvm

    return llvm


@functools.cache
def _initialise() -> None:
    _llvm().initialize_native_target()
    _llvm().initialize_native_asmprinter()


def bind_symbol(name: str, address: int) -> None:
    """Make `name` mean `address` for objects loaded from now on. The caller keeps what is there alive."""
    _llvm().add_symbol(name, address)


class ObjectCode:
    """Some objects, linked and executable."""

    def __init__(self, *objects: bytes) -> None:
        with _loading:
            _initialise()
            llvm = _llvm()
            machine = llvm.Target.from_default_triple().create_target_machine(reloc="pic", codemodel="small")
            # llvmlite's memory manager keeps the sections of an object within reach of each other.
            self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine, use_lmm=True)
            for data in objects:
                self._engine.add_object_file(llvm.ObjectFileRef.from_data(data))
            self._engine.finalize_object()

    def address(self, name: str) -> int:
        """Where the function `name` is."""
        found = int(self._engine.get_function_address(name))
        assert found, name
        return found
