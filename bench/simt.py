"""Explicit kernels of users against the same algorithms in CUDA C++: `python -m bench.run simt`.

The kernels are those of `examples/simt`. Both sides read and write the same buffers, and are timed with events on the device.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from bench import simt_cuda
from bench.gpu import Bound, Machine, difference
from bench.harness import OURS, Bar, Case, Prepared, Variant

EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "simt"
PARITY = Bar(0.97)


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"simt_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def cases(machine: Machine, quick: bool) -> list[Case]:
    side, cube, bodies, picture, matrix = (2048, 256, 8192, 1024, 1024) if quick else (8192, 512, 65536, 4096, 4096)
    return [
        Case("transpose", (side, side), "f32", 8 * side * side, lambda: transpose_case(machine, side), PARITY),
        Case("stencil", (cube, cube, cube), "f32", 8 * cube**3, lambda: stencil_case(machine, cube), PARITY),
        Case("nbody", (bodies,), "f32", 28 * bodies, lambda: nbody_case(machine, bodies), PARITY),
        Case("mandelbrot", (picture, picture), "f32", 4 * picture * picture, lambda: mandelbrot_case(machine, picture), PARITY),
        Case("matmul", (matrix, matrix, matrix), "f32", 12 * matrix * matrix, lambda: matmul_case(machine, matrix), PARITY),
    ]


def _prepared(
    machine: Machine, out: torch.Tensor, ours: Callable[[], object], peer: tuple[str, tuple[int, ...], tuple[int, ...]], values: tuple[Any, ...],
    reference: Callable[[], torch.Tensor], bound: Bound, batch: int = 1,
) -> Prepared:  # fmt: skip
    """Ours and the CUDA kernel of that name, on that grid and block, with these arguments."""
    name, grid, block = peer
    built, module = simt_cuda.module()
    function = module.get_function(name)
    kept: list[torch.Tensor] = []

    def verify(slot: int, returned: object, variant: Variant) -> str:
        machine.synchronize()
        if not kept:
            kept.append(reference())
        return difference(out, kept[0], bound)

    variants = [Variant(OURS, lambda slot: ours()), Variant(built, lambda slot: function(grid, block, values))]
    return Prepared(variants, lambda: (out.fill_(-1), None)[1], verify, batch=batch)


def transpose_case(machine: Machine, side: int) -> Prepared:
    import cupy
    import numpy as np

    kernel = example("transpose").transpose
    x, out = torch.randn(side, side, device=machine.device), torch.empty(side, side, device=machine.device)
    grid, block = (-(-side // 32), -(-side // 32)), (32, 8)
    own, target = machine.wrap(x), machine.wrap(out)
    launch = kernel[grid, block]
    values = (cupy.asarray(x), cupy.asarray(out), np.int32(side), np.int32(side))
    return _prepared(
        machine, out, lambda: launch(own, target), ("transpose", grid, block), values, lambda: x.T.double(), Bound(0, 0)
    )


def stencil_case(machine: Machine, cube: int) -> Prepared:
    import cupy
    import numpy as np

    module = example("stencil")
    t, out = torch.randn(cube, cube, cube, device=machine.device), torch.empty(cube, cube, cube, device=machine.device)
    grid, block = module.blocks((cube, cube, cube)), module.BLOCK

    def reference() -> torch.Tensor:
        wide, inner = t.double(), slice(1, -1)
        result = wide.clone()
        result[inner, inner, inner] += 0.1 * (
            wide[inner, inner, :-2] + wide[inner, inner, 2:] + wide[inner, :-2, inner] + wide[inner, 2:, inner]
            + wide[:-2, inner, inner] + wide[2:, inner, inner] - 6 * wide[inner, inner, inner]
        )  # fmt: skip
        return result

    own, target = machine.wrap(t), machine.wrap(out)
    launch = module.heat[grid, block]
    values = (cupy.asarray(t), cupy.asarray(out), np.float32(0.1), *[np.int32(cube)] * 3)
    return _prepared(machine, out, lambda: launch(own, target, 0.1), ("heat", grid, block), values, reference, Bound(1e-5, 1e-5))


def nbody_case(machine: Machine, n: int) -> Prepared:
    import cupy
    import numpy as np

    module = example("nbody")
    place = torch.randn(n, 4, device=machine.device)
    place[:, 3] = place[:, 3].abs()
    out = torch.empty(n, 3, device=machine.device)
    grid, block = (-(-n // 256),), (256,)

    def reference() -> torch.Tensor:
        wide, parts = place.double(), []
        for first in range(0, n, 256):
            apart = wide[None, :, :3] - wide[first : first + 256, None, :3]
            pull = wide[None, :, 3] * ((apart * apart).sum(2) + module.SOFTENING) ** -1.5
            parts.append((apart * pull[:, :, None]).sum(1))
        return torch.cat(parts)

    own, target = machine.wrap(place), machine.wrap(out)
    launch = module.accelerations[grid, block]
    values = (cupy.asarray(place), cupy.asarray(out), np.int32(n))
    bound = Bound(1e-2, 0.05 * n**0.5)
    return _prepared(machine, out, lambda: launch(own, target), ("accelerations", grid, block), values, reference, bound)


def mandelbrot_case(machine: Machine, side: int) -> Prepared:
    import cupy
    import numpy as np

    module = example("mandelbrot")
    out = torch.empty(side, side, device=machine.device, dtype=torch.int32)
    grid, block = (-(-side // 32), -(-side // 8)), module.BLOCK
    step, limit = 3.0 / side, 1000
    launch = module.mandelbrot[grid, block]
    target, foreign = machine.wrap(out), cupy.asarray(out)
    values = (foreign, np.int32(side), np.int32(side), np.float32(-2.0), np.float32(-1.5), np.float32(step), np.int32(limit))

    def reference() -> torch.Tensor:
        """Points at the border differ with the last bit: what counts is that nearly all agree."""
        x = torch.zeros(side, side, device=machine.device)
        y, count = torch.zeros_like(x), torch.zeros_like(x)
        cx = np.float32(-2.0) + np.float32(step) * torch.arange(side, device=machine.device, dtype=torch.float32)
        cy = (np.float32(-1.5) + np.float32(step) * torch.arange(side, device=machine.device, dtype=torch.float32))[:, None]
        for _ in range(limit):
            inside = x * x + y * y <= 4
            count += inside
            x, y = torch.where(inside, x * x - y * y + cx, x), torch.where(inside, 2 * x * y + cy, y)
        return count

    def verify(slot: int, returned: object, variant: Variant) -> str:
        machine.synchronize()
        if not kept:
            kept.append(reference())
        part = float((out == kept[0]).double().mean())
        return "" if part > 0.98 else f"{part:.4f} of the points agree"

    kept: list[torch.Tensor] = []
    built, cuda = simt_cuda.module()
    function = cuda.get_function("mandelbrot")
    variants = [
        Variant(OURS, lambda slot: launch(target, -2.0, -1.5, step, limit)), Variant(built, lambda slot: function(grid, block, values)),
    ]  # fmt: skip
    return Prepared(variants, lambda: (out.fill_(-1), None)[1], verify)


def matmul_case(machine: Machine, n: int) -> Prepared:
    import cupy
    import numpy as np

    module = example("matmul")
    a, b = torch.randn(n, n, device=machine.device), torch.randn(n, n, device=machine.device)
    out = torch.empty(n, n, device=machine.device)
    grid, block = (-(-n // 32), -(-n // 32)), (32, 32)
    own = [machine.wrap(t) for t in (a, b, out)]
    launch = module.matmul[grid, block]
    values = (*(cupy.asarray(t) for t in (a, b, out)), *[np.int32(n)] * 3)
    return _prepared(
        machine,
        out,
        lambda: launch(*own),
        ("matmul", grid, block),
        values,
        lambda: a.double() @ b.double(),
        Bound(1e-4, 1e-4 * n**0.5),
    )
