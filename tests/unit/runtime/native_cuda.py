"""A fake driver that machine code can call: entry points with the driver's own signatures, which run the fake's Python functions."""

from __future__ import annotations

import ctypes

from fake_cuda import FakeCuda

_POINTER, _WORD = ctypes.c_void_p, ctypes.c_uint32
FIRST_FUNCTION = 0xF0000


class _Config(ctypes.Structure):
    """The driver's CUlaunchConfig."""

    _fields_ = [
        ("grid", _WORD * 3), ("block", _WORD * 3), ("shared", _WORD), ("stream", ctypes.c_uint64), ("attributes", ctypes.c_uint64),
        ("count", _WORD),
    ]  # fmt: skip


class NativeCuda(FakeCuda):
    """`native` lists what machine code launched: name, grid, threads, shared bytes, stream, attributes."""

    def __init__(self, memory: int = 1 << 30, count: int = 1) -> None:
        super().__init__(memory, count)
        self.functions: list[str] = []
        self.native: list[tuple[str, tuple[int, int, int], int, int, int, tuple[int, ...]]] = []
        self.native_status = 0
        plain = ctypes.CFUNCTYPE(_WORD, _POINTER, *[_WORD] * 7, _POINTER, _POINTER, _POINTER)(self.launch)
        extended = ctypes.CFUNCTYPE(_WORD, _POINTER, _POINTER, _POINTER, _POINTER)(self.launch_extended)
        current = ctypes.CFUNCTYPE(_WORD, _POINTER)(self.native_context)
        self.entries = {b"cuLaunchKernel": plain, b"cuLaunchKernelEx": extended, b"cuCtxGetCurrent": current}

    def cuDriverGetVersion(self) -> int:
        return 13000

    def cuGetProcAddress(self, name: bytes, version: int, flags: object) -> tuple[int, int]:
        return ctypes.cast(self.entries[name], _POINTER).value or 0, 0

    def cuModuleGetFunction(self, module: int, name: bytes) -> int:  # type: ignore[override]
        self.functions.append(name.decode())
        return FIRST_FUNCTION + len(self.functions) - 1

    def name_of(self, function: int) -> str:
        return self.functions[function - FIRST_FUNCTION]

    def cuLaunchKernel(self, function: int, *rest: int) -> None:  # type: ignore[override]
        super().cuLaunchKernel(self.name_of(function), *rest)

    def cuLaunchKernelEx(self, config: object, function: int, parameters: int, extra: int) -> None:  # type: ignore[override]
        super().cuLaunchKernelEx(config, self.name_of(function), parameters, extra)  # type: ignore[arg-type]

    def launch(
        self, function: int, x: int, y: int, z: int, threads: int, ty: int, tz: int, shared: int, stream: int | None, table: int, extra: int
    ) -> int:
        assert (ty, tz) == (1, 1)
        return self._run(function, (x, y, z), threads, shared, stream or 0, (), table)

    def launch_extended(self, config: int, function: int, table: int, extra: int) -> int:
        c = _Config.from_address(config)
        words = tuple((_WORD * 3).from_address(c.attributes)) if c.count else ()
        assert tuple(c.block[1:]) == (1, 1)
        x, y, z = c.grid
        return self._run(function, (x, y, z), c.block[0], c.shared, c.stream, words, table)

    def _run(
        self, function: int, grid: tuple[int, int, int], threads: int, shared: int, stream: int, attributes: tuple[int, ...], table: int
    ) -> int:
        name = self.name_of(function)
        self.native.append((name, grid, threads, shared, stream, attributes))
        if not self.native_status and name in self.kernels:
            self.kernels[name](table, grid)
        return self.native_status

    def native_context(self, result: int) -> int:
        ctypes.c_uint64.from_address(result).value = self.stack()[-1]
        return 0
