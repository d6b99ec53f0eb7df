"""Sizes that leave 64 bits, and memory that nobody has: refused on every device, with the bytes that were wanted."""

from __future__ import annotations

import ctypes
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tilewright as tw
from null_cuda.install import installed


@tw.kernel
def between(x: tw.Array) -> tw.Array:
    n = x.shape[0]
    t = tw.empty((n, n, n, n), x.dtype)
    for i in range(2):
        t[i, 0, 0, 0] = x[i] * 3
    out = tw.empty((2,), x.dtype)
    for i in range(2):
        out[i] = t[i, 0, 0, 0]
    return out


@tw.kernel
def several(x: tw.Array) -> tw.Array:
    """Two arrays between loops; the bytes of each fit, those of both do not."""
    n = x.shape[0]
    s = tw.empty((n, n, n, 4096), tw.f64)
    t = tw.empty((n, n, n, 4096), tw.f64)
    for i in range(2):
        s[i, 0, 0, 0] = x[i]
        t[i, 0, 0, 0] = x[i] + 1
    out = tw.empty((2,), x.dtype)
    for i in range(2):
        out[i] = s[i, 0, 0, 0] + t[1 - i, 0, 0, 0]
    return out


@tw.kernel
def constant(x: tw.Array) -> tw.Array:
    t = tw.empty((2, 2**40, 2**40), x.dtype)
    for i in range(2):
        t[i, 0, 0] = x[i] * 3
    out = tw.empty((2,), x.dtype)
    for i in range(2):
        out[i] = t[i, 0, 0]
    return out


@tw.kernel
def result(x: tw.Array) -> tw.Array:
    n = x.shape[0]
    out = tw.empty((n, n, n, n), x.dtype)
    for i in range(2):
        out[i, 0, 0, 0] = x[i]
    return out


@tw.kernel
def flat(x: tw.Array) -> tw.Array:
    """One extent that is a product."""
    n = x.shape[0]
    out = tw.empty((n * n * n * n,), x.dtype)
    for i in range(2):
        out[i] = x[i]
    return out


@tw.kernel
def shrunk(x: tw.Array) -> tw.Array:
    n = x.shape[0]
    t = tw.empty((n - 5,), x.dtype)
    for i in range(n - 5):
        t[i] = x[i] * 3
    out = tw.empty((2,), x.dtype)
    for j in range(2):
        total = 0.0
        for i in range(n - 5):
            total += t[i] * (i + j)
        out[j] = total
    return out


X = np.ones(1 << 16, np.float32)
DEVICES = ("cpu", "emulator", "emulator:thread", "cuda")


@pytest.mark.parametrize("device", DEVICES)
def test_what_no_machine_has_is_out_of_memory(device: str) -> None:
    def refused(kernel: object, x: np.ndarray = X) -> str:
        with pytest.raises(tw.TilewrightError) as caught:
            kernel(x, device=device)  # type: ignore[operator]
        assert caught.value.code == "TW031"
        return str(caught.value)

    with installed(mode="eager"):
        assert "65536, 65536, 65536, 65536" in refused(between)
        assert str(4 << 64) in (text := refused(result)) or "65536, 65536, 65536, 65536" in text
        refused(flat)
        refused(constant)
        refused(several, X[: 1 << 15])
        refused(several, np.ones(3000, np.float32))  # bytes that 64 bits hold, and no machine
        # The same kernels work where there is memory, and still after a refusal.
        assert between(X[:3], device=device).tolist() == [3, 3]
        if device.startswith("emulator"):
            for kernel in (result, flat):
                with pytest.raises(tw.UserError, match="was never written"):
                    kernel(X[:3], device=device)
        else:
            assert result(X[:3], device=device).shape == (3, 3, 3, 3)
            assert flat(X[:3], device=device).shape == (81,)


@pytest.mark.parametrize("device", DEVICES)
def test_a_negative_extent_is_named(device: str) -> None:
    with installed(mode="eager"):
        assert shrunk(np.ones(8, np.float32), device=device).tolist() == [9, 18]
        with pytest.raises(tw.TilewrightError, match="axis 0 of the array 't' would have extent n - 5 = -2") as caught:
            shrunk(np.ones(3, np.float32), device=device)
        assert caught.value.code == "TW004"


@pytest.mark.parametrize("kind", ["local", "shared"])
def test_arrays_of_explicit_kernels(kind: str) -> None:
    def kernel(count: int) -> tw.GpuKernel:  # type: ignore[type-arg]
        if kind == "local":

            @tw.gpu
            def own(x: tw.GpuBuffer[tw.f32], out: tw.GpuBuffer[tw.f32]) -> None:
                i = tw.thread.x
                held = tw.local((count, 4), tw.f32)
                held[count - 1, i] = x[i] + 1
                out[i] = held[count - 1, i]
        else:

            @tw.gpu
            def own(x: tw.GpuBuffer[tw.f32], out: tw.GpuBuffer[tw.f32]) -> None:
                i = tw.thread.x
                held = tw.shared((count, 4), tw.f32)
                held[count - 1, i] = x[i] + 1
                out[i] = held[count - 1, i]

        return own

    x = np.arange(4, dtype=np.float32)
    for count in (2, 10**4, 10**5):  # on the stack, and not
        out = np.zeros(4, np.float32)
        kernel(count)[1, 4](x, out, device="cpu")
        assert out.tolist() == [1, 2, 3, 4]
    for device in ("cpu", "emulator"):
        for count in (10**10, 10**13, 1 << 58, 1 << 62):
            with pytest.raises(tw.TilewrightError) as caught:
                kernel(count)[1, 4](x, x.copy(), device=device)
            assert caught.value.code == "TW031", (device, count)
    with installed(mode="eager"):
        for count in (10**5, 1 << 62):
            with pytest.raises(tw.TilewrightError, match=rf"needs {16 * count} bytes of {kind} memory") as caught:
                kernel(count)[1, 4](x, x.copy(), device="cuda")
            assert caught.value.code == "TW020"


def test_grids_beyond_64_bits() -> None:
    @tw.gpu
    def first(x: tw.GpuBuffer[tw.f32]) -> None:
        i = tw.gpu_thread_id()
        if i < 1:
            x[i] = 1

    with installed(mode="eager"):
        for device in ("cpu", "emulator", "cuda"):
            for grid in (1 << 63, (1 << 31, 1 << 31, 1 << 31), 1 << 80):
                with pytest.raises(tw.TilewrightError) as caught:
                    first[grid, 32](np.zeros(1, np.float32), device=device)
                assert caught.value.code == "TW020", (device, grid)


def test_exported_functions_say_so(tmp_path: Path) -> None:
    names = {"between": between, "flat": flat, "several": several}
    for name, kernel in names.items():
        tw.export(kernel, np.zeros(8, np.float32), folder=str(tmp_path), target="cpu", name=name)
    entry = {name: getattr(ctypes.CDLL(str(tmp_path / f"lib{name}.so")), name) for name in names}
    out = np.zeros(1 << 12, np.float32)

    def code(name: str, n: int) -> int:
        entry[name].restype, entry[name].argtypes = ctypes.c_int32, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        return int(entry[name](X.ctypes.data, out.ctypes.data, n))

    assert code("between", 4) == 0
    assert out[:2].tolist() == [3, 3]
    for n in (1 << 16, 1 << 40, (1 << 63) - 1):
        assert code("between", n) == -1, n
        assert code("several", n) == -1, n
    assert code("several", 1 << 15) == -1
    assert code("between", -1) == -2
    assert '-4: return "a number computed from the sizes is more than 64 bits hold"' in (tmp_path / "flat.h").read_text()


@pytest.mark.skipif(not Path("/usr/bin/cc").exists(), reason="no C compiler")
def test_sizes_of_an_exported_gpu_kernel_in_c(tmp_path: Path) -> None:
    tw.export(between, np.zeros(8, np.float32), folder=str(tmp_path), target="sm_90a")
    header = (tmp_path / "between.h").read_text()
    scratch = next(word.partition("(")[0] for word in header.split() if "_bytes(" in word)
    grid = next(word.partition("(")[0] for word in header.split() if "_grid(" in word and word.startswith("tw_"))
    (tmp_path / "main.c").write_text(
        '#include <stdio.h>\n#include "between.h"\n'
        "int main(void) {\n    unsigned grid[3];\n    int64_t at[] = {0, 8, 1 << 13, 1 << 16, INT64_C(1) << 40, INT64_MAX};\n"
        f'    for (int i = 0; i < 6; i++) printf("%lld %d ", (long long){scratch}(at[i]), {grid}(at[i], grid));\n'
        '    printf("%lld %lld %lld", (long long)tilewright_ceildiv(-7, 2), (long long)tilewright_mod(-7, 4),\n'
        "           (long long)tilewright_add(INT64_MAX, -1));\n    return 0;\n}\n"
    )
    subprocess.run(["cc", "-Wall", "-Werror", "-fsanitize=undefined", "-fno-sanitize-recover", "-o", "main", "main.c"], cwd=tmp_path, check=True)
    printed = subprocess.run(["./main"], cwd=tmp_path, check=True, capture_output=True, text=True).stdout.split()
    large = str(-(1 << 63))
    assert printed[:12:2] == ["0", str(4 * 8**4), str(4 << 52), large, large, large]
    assert printed[1] == printed[3] == "0"
    assert printed[12:] == ["-3", "1", str((1 << 63) - 2)]


_STARVED = """
import resource, sys
import numpy as np, tilewright as tw
@tw.gpu
def own(x: tw.GpuBuffer[tw.f32], out: tw.GpuBuffer[tw.f32]):
    i = tw.thread.x
    held = tw.shared((40_000_000,), tw.f32)
    held[i] = x[i] + 1
    out[i] = held[i]
@tw.kernel
def between(x: tw.Array) -> tw.Array:
    n = x.shape[0]
    t = tw.empty((n, 1000), x.dtype)
    for i in range(n):
        t[i, 0] = x[i] * 3
    out = tw.empty((2,), x.dtype)
    for i in range(2):
        out[i] = t[n - 1 - i, 0]
    return out
x = np.arange(4, dtype=np.float32)
large = np.ones(50_000, np.float32)
def both():
    out = np.zeros(4, np.float32)
    own[1, 4](x, out, device="cpu")
    return out.tolist() + between(large).tolist()
assert both() == [1, 2, 3, 4, 3, 3]
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20), resource.RLIM_INFINITY))
for call in (lambda: own[1, 4](x, np.zeros(4, np.float32), device="cpu"), lambda: between(large)):
    for _ in range(3):
        try:
            call()
            print("ran")
        except tw.TilewrightError as error:
            print(error.code)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(both())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
def test_memory_that_is_refused_at_run_time(tmp_path: Path) -> None:
    """The allocator gives nothing: the launch, and the call, say so; with memory again, both go on."""
    assert resource.RLIMIT_AS
    (tmp_path / "starved.py").write_text(_STARVED)
    done = subprocess.run([sys.executable, "starved.py"], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split("\n")[:7] == ["TW031"] * 6 + ["[1.0, 2.0, 3.0, 4.0, 3.0, 3.0]"]
