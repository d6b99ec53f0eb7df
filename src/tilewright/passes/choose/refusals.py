"""Why a kernel that looks like a product or attention got no schedule of that kind.

In: a loop-stage kernel, the target and sizes. Out: the reason as the end of a sentence, with what to write instead; empty where plain loops
serve the kernel as well, as with thin products.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.analysis.attention import attention_refusal, find_attention
from tilewright.analysis.contraction import Contraction, contraction_refusal, find_contraction, restates_bounds
from tilewright.base.target import Target
from tilewright.ir.nodes import Kernel, walk
from tilewright.ir.types import dtype_of
from tilewright.passes.choose.cpu.contraction import ACCUMULATORS, is_tiny
from tilewright.passes.choose.mma import THIN
from tilewright.passes.choose.wgmma_tiles import shape_of
from tilewright.passes.common.split_form import find_split

_ADVICE = {
    "its result is stored under a condition": "store every result (a condition may choose the value: `out[i, j] = acc if … else 0`)",
    "the sum stands under a condition or in a loop that runs in order": "let the loops over the results be tw.grid, with the sum directly inside",
    "no loop over its results runs in any order": "put the loop over the sum innermost: for i, j in tw.grid(m, n), then for k in range(…) with `acc += a[i, k] * b[k, j]`",
    "what is added up is no product of two factors": "add up a product of two factors and nothing else, as in `acc += a[i, k] * b[k, j]`",
    "the two factors that are multiplied last do not each vary along results of their own": (
        "group the factors so that one has all of the rows and the other all of the columns: `(a[i, k] * d[k]) * b[k, j]`"
    ),
    "several conditions choose its terms, or one that speaks of the indices of both factors": (
        "join the conditions of one factor by `and`, and let each speak of that factor's indices only"
    ),
    "a loop's length depends on another loop's index, or on data": "let the sum run over the whole axis, over operands that hold zeros where terms do not count",
}
_PLAIN = "write the product as a nest of its own: for i, j in tw.grid(m, n), an inner sum `acc += a[i, k] * b[k, j]`, one store"


def checked_index(kernel: Kernel) -> tuple[str, str]:
    """Of a kernel whose indices are checked as it runs, which plain loops alone do: that reason, and what to do."""
    watched = next((op for op in walk(kernel.body) if "watch" in op.attrs), None)
    if watched is None:
        return "", ""
    return (
        f"an index of '{watched.operands[0].name}' is not proven to lie in the array, and is checked as the kernel runs",
        "index by loops over the array's own extents; if it is in range by other reasons, unchecked=True (in ZynML @unchecked) leaves the checks out",
    )


def product_refusal(kernel: Kernel, target: Target, sizes: Mapping[str, int]) -> tuple[str, str]:
    """Of a kernel that looks like a product or convolution: the reason, and what to do."""
    if "activations" in kernel.attrs and not target.simt:
        return "", ""  # sums of integers, which have a lowering of their own
    if "repairs" in kernel.attrs or "repaired" in kernel.attrs:
        return "", ""  # a triangle of a product, and what looks at its results
    reason = contraction_refusal(kernel)
    if not reason and checked_index(kernel)[0]:
        return checked_index(kernel)
    if reason:
        return reason, _ADVICE.get(reason, _PLAIN)
    found = find_contraction(kernel)
    assert found is not None
    if "padded" not in kernel.attrs and not all(f.guard is None or restates_bounds(found, f) for f in (found.a, found.b)):
        return (
            "a condition leaves out terms for another reason than that an index is outside its array",
            "let the condition compare the operand's own indices with its extents, or multiply by a factor that is zero there",
        )
    return _without_schedule(found, target, sizes)


def _without_schedule(found: Contraction, target: Target, sizes: Mapping[str, int]) -> tuple[str, str]:
    """Of a contraction: which of the target's rules it fails."""
    total = found.accumulator
    if target.simt:
        shape = shape_of(found, sizes)
        if min(shape.m, shape.n) <= THIN or not target.has("tiles") or target.has("serial"):
            return "", ""
        if total.is_small_float:
            return f"its sum is kept in {total}", "accumulate in f32: `acc = tw.f32(0)`"
    elif total not in ACCUMULATORS:
        return f"its sum is kept in {total}", "accumulate in f32 or f64, or in i32 or i64"
    elif target.vector_bytes < 16 or is_tiny(found):
        return "", ""
    return (
        f"no schedule multiplies {found.a.dtype} by {found.b.dtype} into {total} here",
        "convert the operands to one dtype first, and let both be read by loops and sizes alone",
    )


def refused_attention(kernel: Kernel, target: Target) -> tuple[str, str]:
    """Of a kernel that looks like attention: the reason, and what to do."""
    reason = attention_refusal(kernel)
    form = find_split(kernel, known=False) if target.simt else None
    if form is not None and form.found.count is not None:
        return "", ""  # in parts of its keys, in plain loops if need be
    if reason:
        return reason, "write the maximum of the scores, the sum of exp(score - maximum), the weighted sum of the values"
    if checked_index(kernel)[0]:
        return checked_index(kernel)
    found = find_attention(kernel)
    assert found is not None
    dtypes = ", ".join(dict.fromkeys(str(dtype_of(op.result.type)) for op in (found.query, found.key, found.value)))
    if target.simt and (not target.has("mma") or found.depth.constant is None or found.column_extent.constant is None):
        return "", ""  # whether there is a schedule depends on sizes that are not known here
    return f"no schedule for {target.name} takes operands of {dtypes} that lie like these", "use f16 or bf16 queries, keys and values, contiguous along the head"
