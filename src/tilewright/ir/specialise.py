"""A program for certain sizes: some of its size names become numbers. In: a loop-stage program and values; out: the same for those.

What such code relies on is checked like any constant extent of an input: an array of another size needs other code.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tilewright.base.record import replace
from tilewright.base.sizes import Size
from tilewright.ir.nodes import Attr, Block, Kernel, Op, Value
from tilewright.ir.program import LoopTurn, OrderedLoop, Program, ProgramArray, ProgramCheck
from tilewright.ir.types import Tensor, Type


def with_sizes(program: Program, values: Mapping[str, int]) -> Program:
    """The program with these names as numbers."""
    return substituted(program, {name: Size.of(number) for name, number in values.items()})


CONTRADICTION = "sizes {left} and {right} do not match"


def substituted(program: Program, known: Mapping[str, Size], renames: bool = False) -> Program:
    """The program with these names replaced by other sizes. What is known of what divides them goes with them. A computed size that becomes another one
    must be equal to it; with `renames` it only gets another name."""

    def size(old: Size) -> Size:
        return old.substitute(known) if old.names & known.keys() else old

    def tensor(old: Tensor) -> Tensor:
        return replace(old, shape=tuple(map(size, old.shape)), strides=tuple(map(size, old.strides)))

    def array(old: ProgramArray) -> ProgramArray:
        return replace(old, type=tensor(old.type))

    def check(old: ProgramCheck) -> ProgramCheck:
        return replace(old, left=size(old.left), right=size(old.right))

    def attribute(old: Attr) -> Attr:
        if isinstance(old, Size):
            return size(old)
        return tuple(map(attribute, old)) if isinstance(old, tuple) else old

    def type_of(old: Type) -> Type:
        return tensor(old) if isinstance(old, Tensor) else old

    def kernel(old: Kernel) -> Kernel:
        params = {p: Value(type_of(p.type), p.name) for p in old.params}

        def block(region: Block) -> Block:
            return Block(region.args, tuple(map(one, region.ops)))

        def one(op: Op) -> Op:
            return replace(
                op, operands=tuple(params.get(v, v) for v in op.operands), regions=tuple(map(block, op.regions)),
                attrs=MappingProxyType({name: attribute(value) for name, value in op.attrs.items()}),
            )  # fmt: skip

        facts = MappingProxyType({name: divisor for name, divisor in old.facts.items() if name not in known})
        return replace(old, params=tuple(params.values()), body=block(old.body), facts=facts)

    def loop(old: OrderedLoop) -> OrderedLoop:
        return replace(old, name=name_of(old.name), count=None if old.count is None else size(old.count))

    def name_of(old: str) -> str:
        """The number of a step stays a name."""
        return known[old].name or old if old in known else old

    def turns(old: tuple[LoopTurn, ...]) -> tuple[LoopTurn, ...]:
        return tuple(replace(turn, loop=name_of(turn.loop)) for turn in old)

    return replace(
        program,
        inputs=tuple(array(a) if isinstance(a, ProgramArray) else a for a in program.inputs),
        outputs=tuple(map(array, program.outputs)),
        scratch=tuple(map(array, program.scratch)),
        calls=tuple(replace(call, kernel=kernel(call.kernel), loops=turns(call.loops)) for call in program.calls),
        loops=tuple(map(loop, program.loops)),
        checks=(*map(check, program.checks), *(ProgramCheck(size(s), "eq", known[n], CONTRADICTION) for n, s in program.computed if n in known and not renames)),
        computed=tuple((str(known.get(n, n)), size(s)) for n, s in program.computed if renames or n not in known),
    )
