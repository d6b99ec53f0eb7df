"""What LLVM calls on x86-64 where a bf16 goes through a branch or an atomic operation: a float rounded to bf16.

In: an object and its target. Out: what to add to the text it was made of. Kernels round in code of their own, and systems may lack the function: a
symbol that is nowhere leaves a loaded object without any of its addresses. The definition gives way to another one.
"""

from __future__ import annotations

from tilewright.base.target import Target

# The result is the low half of a float's register: as a bf16 it would itself be rounded by such a call.
_NAME = "__truncsfbf2"
_ROUND = f"""
define weak hidden float @{_NAME}(float %x) {{
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
}}
"""


def helpers(code: bytes, target: Target) -> str:
    """Functions that an object calls and nobody may have, as text."""
    return _ROUND if target.triple.startswith("x86_64") and _NAME.encode() in code else ""
