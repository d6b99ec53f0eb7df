"""Functions that are kernels themselves: their source, which is put in the place of a call as that of any called kernel is.

In: what the call fixes. Out: the text of a kernel of one array.

The median is found without sorting: f64's bits, turned so that they order as the numbers do, are fixed from the highest bit down, each by counting the
elements below a trial. That is 64 sums, whatever the number of elements, and the device does each as it does any sum.
"""

from __future__ import annotations

from collections.abc import Sequence

_LARGEST = "0x7FFFFFFFFFFFFFFF"


def median_text(axes: Sequence[int] | None, keep: bool) -> str:
    """The kernel of `tw.median` along these axes, or along all. A NaN among the elements is the result, as is NaN where there are none."""
    axis = "" if axes is None else f", axis={tuple(axes)!r}"
    count = "x.size" if axes is None else " * ".join(f"x.shape[{a}]" for a in axes)
    kept = f"{axis}, keepdims=True"
    return f"""\
import tilewright as tw

@tw.kernel
def median(x):
    wide = tw.cast(x, tw.f64)
    bits = tw.bitcast(wide, tw.i64)
    key = tw.where(bits < 0, bits ^ {_LARGEST}, bits)
    count = {count}
    low = tw.sum(key * 0{kept}) - {_LARGEST} - 1
    for k in range(64):
        trial = low + (tw.i64(1) << (63 - k))
        low = tw.where(tw.sum(tw.cast(key < trial, tw.i64){kept}) <= (count - 1) // 2, trial, low)
    above = tw.min(tw.where(key > low, key, {_LARGEST}){kept})
    high = tw.where(tw.sum(tw.cast(key <= low, tw.i64){kept}) > count // 2, low, above)
    lower = tw.bitcast(tw.where(low < 0, low ^ {_LARGEST}, low), tw.f64)
    upper = tw.bitcast(tw.where(high < 0, high ^ {_LARGEST}, high), tw.f64)
    lost = tw.sum(tw.where(wide != wide, wide, 0.0){kept})
    kind = tw.mean(x{kept})
    result = kind.dtype((lower + upper) / 2 + lost)
    return {"result" if keep else f"tw.sum(result{axis})"}
"""
