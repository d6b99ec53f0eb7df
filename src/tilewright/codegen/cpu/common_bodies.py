"""One body for kernels that passes know to be the same but for sizes (`KernelCall.shared`).

In: the kernel that they have in common, as a function, and what each call puts in for some of its sizes. Out: LLVM text of the body, and of functions that call it
with sizes of their own.
"""

from __future__ import annotations

from tilewright.codegen.cpu.emitter import FunctionParts, read_slots
from tilewright.codegen.llvm.sizes import SizeEmitter
from tilewright.ir.program import SharedKernel


def can_call(shared: SharedKernel) -> bool:
    """Whether a call has all sizes that the common kernel needs: some may be left out where another is 0."""
    own = set(shared.own.size_names)
    return all(name in own or name in shared.numbers for name in shared.kernel.size_names)


def common_body(body: FunctionParts) -> str:
    """The body alone."""
    written = "\n".join(body.body(body.params, (*body.sizes, *body.lines)))
    return "\n".join((body.held + written + "\n" + "\n".join(body.metadata), *body.parts, ""))


def caller(shared: SharedKernel, entry: str, body: FunctionParts) -> str:
    """The function of one call."""
    own = shared.own
    lines, given = read_slots(own)
    first, end = len(own.params), len(own.params) + len(own.size_names)
    operands = [argument.split()[-1] for argument in given[first:end]]
    sizes = SizeEmitter(lines, dict(zip(own.size_names, operands, strict=True)))
    for name, size in shared.numbers.items():
        sizes.bind(name, sizes.value(size))
    numbers = [f"i64 {sizes.values[name]}" for name in shared.kernel.size_names]
    arguments = ", ".join([*given[:first], *numbers, *given[end:], "i64 %begin", "i64 %end"])
    head = f"define void @{entry}(ptr %slots, i64 %begin, i64 %end) {body.attributes} {{"
    return "\n".join([head, "entry:", *lines, f"  call void @{body.entry}.body({arguments})", "  ret void", "}", ""])
