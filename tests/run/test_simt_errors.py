"""What explicit kernels cannot contain: each message with its line and values, word for word."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from tilewright.base.errors import TilewrightError

HEAD = """import math
import numpy as np
import tilewright as tw

BIG = np.zeros(20000, np.float64)
LARGE = 1 << 70


def recursive(v):
    return recursive(v - 1) if v > 0 else v


def sometimes(v):
    if v > 0:
        return v


@tw.gpu
def other(x: tw.Array):
    x[0] = 1


@tw.gpu
def kernel(x: tw.GpuBuffer[tw.f32], n: tw.i32, a: tw.Array):
    i = tw.gpu_thread_id()
"""
FIRST = HEAD.count("\n") + 1
CASES: dict[str, tuple[str, str, str, str, str]] = {
    # name: (body, what the caret is under, code, message, help)
    "import": ("import os", "import os", "TW005", "import is not available in an explicit kernel", "import at the top of the file"),
    "try": ("try:\n    x[i] = 1\nexcept ValueError:\n    pass", "try:", "TW005", "try is not available in an explicit kernel", "check the values before the kernel is launched"),
    "with": ("with open('f') as f:\n    pass", "with open('f') as f:", "TW005", "with is not available in an explicit kernel", "open resources before the kernel is launched"),
    "raise": ("raise ValueError", "raise ValueError", "TW005", "raise is not available in an explicit kernel", "write an error code into an array"),
    "match": ("match n:\n    case 1:\n        pass", "match n:", "TW005", "match is not available in an explicit kernel", "use if and elif"),
    "class": ("class C:\n    pass", "class C:", "TW005", "class is not available in an explicit kernel", "define it outside the kernel"),
    "global": ("global LARGE\nx[i] = 1", "global LARGE", "TW005", "global is not available in an explicit kernel", "pass an array and write to it"),
    "comprehension": ("y = [k for k in range(3)]", "[k for k in range(3)]", "TW005", "a comprehension is not available in an explicit kernel", "fill a local array in a loop: tw.local(n, tw.f32)"),
    "dict": ("y = {1: 2}", "{1: 2}", "TW005", "a dict is not available in an explicit kernel", "use plain variables or a dataclass"),
    "in": ("if n in (1, 2):\n    x[i] = 1", "n in (1, 2)", "TW005", "'in' is not available in an explicit kernel", "compare numbers with ==, <, …"),
    "matmul": ("y = n @ n", "n @ n", "TW005", "'@' is not available in an explicit kernel", "write the loop over the products"),
    "else of a loop": ("for k in range(3):\n    pass\nelse:\n    x[i] = 1", "x[i] = 1", "TW005", "'else' of a loop is not available in an explicit kernel", "set a flag before break and test it after the loop"),
    "loop over an array": ("for v in x:\n    pass", "x", "TW005", "a loop over the array 'x' is not available in an explicit kernel", "loop over range(...), tw.unrolled(range(...)) or a tuple"),
    "slice": ("y = x[1:3]", "1:3", "TW005", "a slice of an array is not available in an explicit kernel", "index single elements in a loop"),
    "result": ("return n", "return n", "TW005", "a kernel returns nothing", "write the result into an array it is given"),
    "recursion": ("x[i] = recursive(n)", "recursive(v - 1)", "TW005", "'recursive' calls itself", "write a loop: kernels have no recursion"),
    "kernel": ("other(x)", "other(x)", "TW005", "'other' is a kernel and cannot be called from another", "mark what both use with @tw.device, or not at all"),
    "call of a class": ("x[i] = Exception(1)", "Exception(1)", "TW005", "a Python type cannot be called in an explicit kernel", "call words of Tilewright and Python functions"),
    "loop word": ("y = tw.empty(3, tw.f32)", "tw.empty(3, tw.f32)", "TW005", "tilewright.empty is not available in an explicit kernel", ""),
    "unknown": ("x[i] = nothing", "nothing", "TW002", "unknown name 'nothing'", ""),
    "unknown word": ("x[i] = tw.nothing(1)", "tw.nothing", "TW002", "tilewright has no 'nothing'", ""),
    "unknown axis": ("x[i] = tw.thread.w", "tw.thread.w", "TW002", "tilewright.thread has no 'w'", "it has x, y, z"),
    "unknown member": ("x[i] = x.strides", "x.strides", "TW002", "'x' has no 'strides'", "an array in a kernel has shape, size, ndim and dtype"),
    "rank": ("x[i] = a[i, 0, 0]", "a[i, 0, 0]", "TW003", "'a' has 2 axes, but is used with 3 indices", ""),
    "too few": ("a[i] = 0", "a[i]", "TW003", "'a' has 2 axes, but is used with 1 index", ""),
    "float index": ("x[0.5] = 0", "x[0.5]", "TW009", "index 0 of 'x' is the number 0.5, not an integer", "convert it: tw.i32(...) or int(...)"),
    "outside": ("s = tw.shared(4, tw.f32)\ns[4] = 0", "s[4]", "TW013", "index 4 of 's' is outside: axis 0 has extent 4", ""),
    "lossy": ("x[i] = tw.i32(3) * x[i]", "tw.i32(3) * x[i]", "TW006", "'*' of i32 and f32 would lose data", "convert one of them, for instance with tw.f32(...)"),
    "lossy store": ("s = tw.shared(4, tw.i32)\ns[0] = x[i]", "s[0]", "TW006", "'s' is i32, but the value is f32", "convert it: tw.i32(...)"),
    "two types": ("y = x[i]\ny = tw.i64(n)", "y = tw.i64(n)", "TW006", "'y' is f32 at one place and i64 here", "convert the value, for instance with tw.f32(...)"),
    "large": ("x[i] = LARGE", "LARGE", "TW006", f"'LARGE' is {1 << 70}, which no 64-bit integer holds", ""),
    "small integer": ("s = tw.shared(4, tw.u8)\ns[0] = 300", "s[0]", "TW006", "300 does not fit u8", ""),
    "no value": ("if n > 0:\n    y = 1.0\nx[i] = y", "y", "TW017", "'y' may have no value here", "assign 'y' on every way that leads here"),
    "no value after a loop": ("for k in range(n):\n    y = 1.0\nx[i] = y", "y", "TW017", "'y' may have no value here", "assign 'y' on every way that leads here"),
    "not yet": ("x[i] = later\nlater = 1", "later", "TW017", "'later' has no value yet", "assign it before it is used"),
    "no result": ("x[i] = sometimes(x[i])", "sometimes(x[i])", "TW017", "'sometimes' may end without a result", "return a value on every way"),
    "constant shape": ("s = tw.shared(n, tw.f32)", "tw.shared(n, tw.f32)", "TW005", "the shape of a shared array must be known when the kernel is compiled", "use a literal or a captured number"),
    "no dtype": ("s = tw.shared(4, 5)", "tw.shared(4, 5)", "TW009", "dtype is the number 5, not a dtype", "write for instance tw.f32"),
    "missing argument": ("s = tw.shared(4)", "tw.shared(4)", "TW016", "tilewright.shared is missing 'dtype'", ""),
    "unknown argument": ("tw.fence(at='block')", "tw.fence(at='block')", "TW016", "tilewright.fence has no argument 'at'", "its arguments are scope"),
    "scope": ("tw.fence('warp')", "tw.fence('warp')", "TW009", "the scope of a fence is 'warp'", "choose one of thread, block, cluster, device, system"),
    "width": ("x[i] = tw.shuffle(x[i], 0, width=5)", "tw.shuffle(x[i], 0, width=5)", "TW009", "the width of a shuffle is 5", "choose a power of two up to 32"),
    "constant array": ("x[i] = BIG[i]", "BIG", "TW020", "'BIG' has 160000 bytes; a kernel's constant memory has 65536", "pass it as an argument"),
    "zero step": ("for k in range(0, 4, 0):\n    pass", "range(0, 4, 0)", "TW009", "the step of a range is 0", ""),
    "unpacking": ("p, q = 1, 2, 3", "p, q = 1, 2, 3", "TW016", "3 value(s) for 2 name(s)", ""),
    "tuple index": ("x[i] = (1, 2)[2]", "(1, 2)[2]", "TW013", "index 2 is outside: the tuple has 2 item(s)", ""),
    "arithmetic on an array": ("x[i] = x + 1", "x + 1", "TW009", "an operand of '+' is the array 'x', not a number", ""),
    "text": ("x[i] = 'a'", "x[i]", "TW009", "the value is the text 'a', not a number", ""),
    "arrays exchanged in a loop": ("p, q = x, a\nfor k in range(3):\n    p, q = q, p", "for k in range(3):", "TW005", "'p' stands for the array 'x' and changes inside a loop", "choose between elements, or write the loop's body twice"),
    "one array or another": ("if n > 0:\n    p = x\nelse:\n    p = a\np[0] = 1", "if n > 0:", "TW005", "'p' stands for 'x' on one way and for 'a' on the other", "choose between elements: x[i] if c else y[i]"),
    "division by zero": ("x[i] = 1 // 0", "1 // 0", "TW009", "1 // 0: integer division or modulo by zero", ""),
}  # fmt: skip


def load(folder: Path, body: str) -> object:
    path = folder / "bad_kernel.py"
    path.write_text(HEAD + "".join(f"    {line}\n" for line in body.split("\n")))
    spec = importlib.util.spec_from_file_location("bad_kernel", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.kernel


@pytest.mark.parametrize("name", CASES)
def test_message(name: str, tmp_path: Path) -> None:
    body, caret, code, message, help_ = CASES[name]
    kernel = load(tmp_path, body)
    with pytest.raises(TilewrightError) as caught:
        kernel[1, 32](np.zeros(64, np.float32), 3, np.zeros((8, 8), np.float32), device="emulator")  # type: ignore[index]
    (found,) = caught.value.diagnostics
    text = (tmp_path / "bad_kernel.py").read_text().split("\n")
    line = text[found.span.line - 1]
    end = found.span.end_column if found.span.end_line == found.span.line else len(line) + 1
    shown = line[found.span.column - 1 : end - 1]
    assert (found.code, found.message, found.help, shown) == (code, message, help_, caret)
    assert found.span.path.endswith("bad_kernel.py")


def test_errors_in_functions_name_the_call(tmp_path: Path) -> None:
    kernel = load(tmp_path, "x[i] = recursive(n)")
    with pytest.raises(TilewrightError) as caught:
        kernel[1, 32](np.zeros(64, np.float32), 3, np.zeros((8, 8), np.float32), device="emulator")  # type: ignore[index]
    assert f"bad_kernel.py:{FIRST}:12: called here" in str(caught.value)


SIGNATURES = {
    "def kernel(*x): pass": "'*x' is not available in an explicit kernel",
    "def kernel(x: tw.Array) -> tw.f32: pass": "a result is not available in an explicit kernel",
    "def kernel(x: list): pass": "'x' is annotated as a Python type",
    "def kernel(x: 'tw.GpuBuffer[list]'): pass": "the elements of 'x' is a Python type, not a dtype",
}


@pytest.mark.parametrize("text", SIGNATURES)
def test_signatures(text: str, tmp_path: Path) -> None:
    path = tmp_path / "bad_signature.py"
    path.write_text(f"import tilewright as tw\n@tw.gpu\n{text}\n")
    spec = importlib.util.spec_from_file_location("bad_signature", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(TilewrightError) as caught:
        module.kernel[1, 32](np.zeros(4, np.float32), device="emulator")
    assert caught.value.diagnostics[0].message == SIGNATURES[text]
