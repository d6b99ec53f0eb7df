"""The schedules of the products that a kernel computes, best first.

In: a kernel at the loop stage, a target and sizes. Out: schedules, of which the first is taken. What GPUs choose from (`matrix.py`, `gemv.py`, `packed.py`) is
loaded for them alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tilewright.analysis.contraction import find_contraction, restates_bounds
from tilewright.base.target import Target
from tilewright.ir.nodes import Kernel
from tilewright.passes.choose.cpu.contraction import cpu_schedules
from tilewright.passes.packed.elements import radices
from tilewright.passes.packed.unpack_weights import UnpackedForm, unpacked_form
from tilewright.passes.schedules.matrix import CpuProduct, GpuProduct, MatrixSchedule


def product_schedules(kernel: Kernel, target: Target, sizes: Mapping[str, int]) -> tuple[MatrixSchedule, ...]:
    """Schedules for the products a kernel computes, best first; none where it computes none."""
    matrix = matrix_schedules(kernel, target, sizes)
    if not target.simt:
        return matrix
    from tilewright.passes.choose.gemv import FEW_FOR_FMA, gemv_schedules

    rows = gemv_schedules(kernel, target, sizes)
    unpacked = any(isinstance(s, GpuProduct) and (s.unpack or s.b_copy == "packed") for s in matrix)
    if rows and (not matrix or unpacked or rows[0].m <= FEW_FOR_FMA or rows[0].matrix):
        return (*rows, *matrix)
    return (*matrix, *rows)


def matrix_schedules(kernel: Kernel, target: Target, hints: Mapping[str, int]) -> tuple[MatrixSchedule, ...]:
    """Schedules for the contraction the kernel is, best first; none where it is not one, or where plain loops serve it."""
    form = unpacked_form(kernel, rounds=target.simt)
    if form is not None and (target.simt or gains_on_cpu(form)):
        return _of_packed(kernel, form, target, hints)
    found = find_contraction(kernel)
    if found is None:
        return ()
    guarded = found
    if kernel.attrs.get("zeros"):
        found = found.unguarded()
    literal = not all(f.guard is None or restates_bounds(found, f) for f in (found.a, found.b))
    if literal and not kernel.attrs.keys() & {"repaired", "padded"}:
        # A term that a condition leaves out is not the same as one with a factor of zero: the other may be infinite.
        return ()
    if not target.simt:
        return cpu_schedules(kernel, found, target)
    from tilewright.passes.choose.matrix import gpu_schedules

    return gpu_schedules(kernel, guarded, found, literal, target, hints)


def gains_on_cpu(form: UnpackedForm) -> bool:
    """Whether a CPU unpacks weights faster first than as it copies panels: those whose blocks have scales for parts of them."""
    return any(len(radices(factor.format)) > 2 for factor, _ in form.scratch)


def _of_packed(kernel: Kernel, form: UnpackedForm, target: Target, hints: Mapping[str, int]) -> tuple[MatrixSchedule, ...]:
    """Schedules for a product of packed weights: of few rows these are unpacked on their way, of more to scratch before it."""
    if not target.simt:
        return tuple(replace(s, unpack=True) for s in matrix_schedules(form.kernel, target, hints) if isinstance(s, CpuProduct))
    from tilewright.passes.choose.packed import packed_schedules, pays
    from tilewright.passes.choose.wgmma_tiles import shape_of

    found = find_contraction(form.kernel)
    shape = shape_of(found, hints) if found is not None else None
    if shape is None or min(shape.m, shape.n) <= 1:
        return ()
    first = tuple(replace(s, unpack=True) for s in matrix_schedules(form.kernel, target, hints) if isinstance(s, GpuProduct))
    direct = packed_schedules(kernel, target, shape.m, shape.n, shape.k)
    return (*direct, *first) if not first or pays(kernel, target, shape.m) else (*first, *direct)
