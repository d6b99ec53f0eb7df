"""LLVM's functions without `llvmlite.binding`: the same functions, with the same arguments."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import llvmlite.binding as llvm
import pytest
from llvmlite.binding import ffi

from tilewright.base import llvm_library
from tilewright.base.llvm_library import LlvmModule, TargetMachine, host_features, host_name, process_triple


@pytest.mark.parametrize("name", sorted(llvm_library._PROTOTYPES))
def test_prototypes_are_those_of_llvmlite(name: str) -> None:
    theirs = getattr(ffi.lib, "LLVMPY_" + name)
    _, *ours = [llvm_library._TYPES[letter] for letter in llvm_library._PROTOTYPES[name]]
    if theirs.argtypes is not None:
        assert [ctypes.sizeof(t) for t in theirs.argtypes] == [ctypes.sizeof(t) for t in ours]


def test_the_host_is_the_same() -> None:
    assert host_features() == dict(sorted(llvm.get_host_cpu_features().items()))
    assert list(host_features()) == sorted(host_features())
    assert (host_name(), process_triple()) == (llvm.get_host_cpu_name(), llvm.get_process_triple())


@pytest.mark.parametrize("whole", [True, False])
def test_code(whole: bool) -> None:
    module = LlvmModule("define i32 @f(i32 %x) {\n  %y = mul i32 %x, 2\n  %z = sub i32 %y, %x\n  ret i32 %z\n}\n")
    machine = TargetMachine(process_triple())
    module.optimise(machine, 1, False, whole)
    assert "mul" not in str(module) and "ret i32 %x" in str(module)
    assert b"f:" in machine.emit(module, as_object=False)
    module.close()


@pytest.mark.parametrize(("text", "words"), [("define void @f( {", "expected"), ("define i32 @f() {\n ret void\n}", "ret"), ("declare void @f(\0)", "expected")])
def test_text_that_is_no_module(text: str, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        LlvmModule(text)


def test_a_triple_that_llvm_does_not_know() -> None:
    with pytest.raises(RuntimeError, match="nothing"):
        TargetMachine("nothing-at-all")


def test_the_package_is_not_imported() -> None:
    code = "import sys; from tilewright.base.target import host_cpu; host_cpu(); print([m for m in sys.modules if m.startswith('llvmlite')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
