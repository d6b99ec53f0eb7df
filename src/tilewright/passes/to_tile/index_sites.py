"""What both kinds of index checks share: the sites a program can name, and the parts of an access. In: accesses at the tile stage; out: `IndexSite`s."""

from __future__ import annotations

from types import MappingProxyType

from tilewright.base.artifact import IndexSite
from tilewright.base.dtypes import u64
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Attrs, Op, Value
from tilewright.ir.program import KernelCall
from tilewright.ir.types import Tensor


class Sites:
    """The sites of one kernel. Those of all kernels of a program are numbered together, from 1 on."""

    def __init__(self, call: KernelCall, program: str, sites: list[IndexSite]) -> None:
        self.program, self.sites = program, sites
        self.names = dict(zip(call.kernel.params, call.args, strict=True))

    def number(self, op: Op, axis: int) -> int:
        """The number of the site of one axis of an access."""
        memory = op.operands[0]
        assert isinstance(memory.type, Tensor)
        place, excerpt = (op.span.places(), op.span.excerpt()) if op.span.line else ("", "")
        name, rank = self.names.get(memory, memory.name), memory.type.rank
        if isinstance(op.attrs.get("of"), str):
            parted = int(bool(op.attrs.get("alone")))
            name, axis, rank = str(op.attrs["of"]), axis - parted, rank - parted  # a copy: its author knows the array
        site = IndexSite(self.program, "load" if op.opcode == "load" else "store", name, axis, rank, place, excerpt)
        if site not in self.sites:
            self.sites.append(site)
        return self.sites.index(site) + 1


def parts(op: Op) -> tuple[Value, list[Value], list[Value], Value | None]:
    """Memory, indices, what is stored, and the mask of an access."""
    memory = op.operands[0]
    assert isinstance(memory.type, Tensor)
    rank = memory.type.rank
    rest = list(op.operands[1 + rank :])
    mask = rest.pop() if op.attrs.get("masked") else None
    return memory, list(op.operands[1 : 1 + rank]), rest, mask


def inside_of(b: Builder, index: Value, extent: Value) -> Value:
    """Whether an index is neither negative nor too large: one comparison of numbers without a sign."""
    return b.op("lt", b.cast(index, u64), b.like(b.cast(extent, u64), index))


def unwatched(op: Op) -> Attrs:
    return MappingProxyType({k: v for k, v in op.attrs.items() if k != "watch"})
