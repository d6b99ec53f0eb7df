"""What LLVM calls on x86-64 where no instruction rounds to a short float: bf16 in branches and atomic operations, f64 to bf16 and f16.

In: an object and its target. Out: what to add to the text it was made of. Kernels round in code of their own, and systems may lack the functions: a
symbol that is nowhere leaves a loaded object without any of its addresses. The definitions give way to others.

An f64 becomes an f32 first, towards 0, whose last bit says that something was cut off: rounding that once more is as rounding once.
"""

from __future__ import annotations

from tilewright.base.target import Target

# A bf16 is the low half of a float's register: as a bf16 it would itself be rounded by such a call.
_NEAR = """
  %bits = bitcast float %x to i32
  %high = lshr i32 %bits, 16
  %odd = and i32 %high, 1
  %half = add i32 %odd, 32767
  %sum = add i32 %bits, %half
  %near = lshr i32 %sum, 16
  %quiet = or i32 %high, 64
  %nan = fcmp uno float %x, %x
  %word = select i1 %nan, i32 %quiet, i32 %near
  %short = and i32 %word, 65535
  %result = bitcast i32 %short to float
  ret float %result
"""
_CUT = """
  %first = fptrunc double %d to float
  %back = fpext float %first to double
  %changed = fcmp one double %back, %d
  %size = call double @llvm.fabs.f64(double %d)
  %found = call double @llvm.fabs.f64(double %back)
  %larger = fcmp ogt double %found, %size
  %less = zext i1 %larger to i32
  %whole = bitcast float %first to i32
  %toward = sub i32 %whole, %less
  %marked = or i32 %toward, 1
  %chosen = select i1 %changed, i32 %marked, i32 %whole
  %x = bitcast i32 %chosen to float
"""
_FABS = "declare double @llvm.fabs.f64(double)\n"
_FUNCTIONS = {
    "__truncsfbf2": f"define weak hidden float @__truncsfbf2(float %x) {{{_NEAR}}}\n",
    "__truncdfbf2": f"define weak hidden float @__truncdfbf2(double %d) {{{_CUT}{_NEAR}}}\n",
    "__truncdfhf2": f"define weak hidden half @__truncdfhf2(double %d) {{{_CUT}  %result = fptrunc float %x to half\n  ret half %result\n}}\n",
}


def helpers(code: bytes, text: str, target: Target) -> str:
    """Functions that an object calls and nobody may have, as text."""
    if not target.triple.startswith("x86_64"):
        return ""
    called = [function for name, function in _FUNCTIONS.items() if name.encode() in code]
    declared = "" if "declare double @llvm.fabs.f64(" in text else _FABS
    return "\n" + declared + "".join(called) if called else ""
