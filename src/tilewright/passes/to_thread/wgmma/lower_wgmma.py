"""Tile stage -> thread stage for contractions with Hopper's warp-group instructions: roles, rings and the way out.

In: a tile-stage kernel made by `lower_contraction`, with layouts, and its schedule. Out: the thread-stage kernel. A block has one
warp group that copies and several that compute. Operands pass through rings of `stages` tiles in shared memory: a *full* mbarrier
says that a tile has arrived, an *empty* one that it has been read. The computing groups either share a tile, each with its rows, or
take tiles in turns (named barriers pass the right to compute), so that one stores while the other multiplies. The blocks of a cluster
have neighbouring tiles along n: each brings a part of the rows of a and sends it to all, and a stage is empty when all have read it.

    copying:    for tiles { for steps { wait empty[s]; expect full[s]; tma_load a; tma_load b } }
    computing:  for tiles { for steps { wait full[s]; wgmma; wgmma_wait; arrive empty[s] }; epilogue; store }

Of several products of the same rows (`beside`) the second operands lie one behind the other in a stage, and one instruction multiplies all:
a thread has the sums of the first, then those of the second, at the same places of their results.

The first operand may be computed in registers instead (`operand.py`): then what it is computed from is copied, and warps read it.

Results leave piece by piece, 64 rows of 128 bytes: registers, swizzled shared memory, copy engine. The epilogue is computed for one
piece at a time, so few values are alive at once. Edges need no code: copies fill with zeros and leave out what is outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.analysis import divisors
from tilewright.base.dtypes import f32, i32, u32, u64
from tilewright.base.record import record
from tilewright.base.sizes import Size, floordiv
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.layouts import WGMMA_WARPS
from tilewright.ir.nodes import Attr, Block, Kernel, Op, Stage, Value, walk
from tilewright.ir.ops_matrix import ROW_BYTES
from tilewright.ir.types import Tensor, dtype_of
from tilewright.passes.common.registers import Cell, Registers, Shape
from tilewright.passes.schedules.matrix import Wgmma
from tilewright.passes.to_thread.wgmma.epilogue import GROUP, Epilogue, ResultTile
from tilewright.passes.to_thread.wgmma.operand import RegisterOperand
from tilewright.passes.to_thread.wgmma.sums import ClusterSum, StreamSum


def lower_wgmma(kernel: Kernel, schedule: Wgmma, target: Target) -> Kernel:
    """The thread-stage kernel."""
    return _WgmmaLowering(kernel, schedule, target).run()


@record
class _Ring:
    """One operand: its load, where it goes, and how its tile lies there."""

    load: Op
    memory: Value
    map: Value
    tile_axis: int
    """The axis of the tile that is not the sum's: 0 for the first operand, 1 for the second."""
    extent: int
    major: str
    """`k`: rows run along the sum; `mn`: across it, in blocks of 64."""
    blocked: bool
    """The map has an axis of its own for the blocks of 64."""
    stage: int
    """Elements of one stage of `memory`."""
    first: int = 0
    """Those of them before this operand's."""


class _WgmmaLowering:
    """`epilogue` lowers what is around the sum, in either role; `computed`, `shared_sum` and `stream` are there where the schedule asks for them."""

    def __init__(self, kernel: Kernel, schedule: Wgmma, target: Target) -> None:
        self.kernel, self.schedule = kernel, schedule
        tile = ResultTile(
            schedule.m, schedule.n, schedule.math_warpgroups, schedule.pingpong, schedule.epilogue_stages, schedule.store, schedule.horizontal,
            turns=True, fetches=schedule.cluster_k == 1 and not schedule.stream_k, sharing=schedule.cluster_k,
        )  # fmt: skip
        self.epilogue = Epilogue(kernel, tile, target)
        self.env, self.divisors, self.sum, self.rows = self.epilogue.env, self.epilogue.divisors, self.epilogue.sum, self.epilogue.rows
        self.role = ""
        self.products = [op for op in self.sum.regions[0].ops if op.opcode == "dot"]
        self.product = self.products[0]
        self.made = {result: op for op in walk(kernel.body) for result in op.results}
        self.dtype = dtype_of(self.product.operands[0].type)
        self.width = ROW_BYTES // self.dtype.itemsize
        """Elements along the sum that a row of shared memory has: of those of a step, or more that nobody multiplies."""
        self.rank: Value | None = None
        """This block's number in its cluster."""
        self.shared_sum: ClusterSum | None = None
        self.stream: StreamSum | None = None
        self.computed: RegisterOperand | None = None
        """The first operand, where it is computed in registers."""
        if schedule.a_copy == "rs":
            self.computed = RegisterOperand(self.epilogue, self.product.operands[0], schedule.k)
        self.rings: list[_Ring] = []
        self.pairs: list[tuple[int, int]] = [(0, 0)]
        """Which of the tiles of both operands in a stage are multiplied, in this order."""

    # -- the whole kernel ---------------------------------------------------------------------------------------

    def run(self) -> Kernel:
        b = Builder(self.kernel.span)
        s = self.schedule
        self.epilogue.coordinates(b)
        if s.cluster > 1:
            self.rank = b.op("cluster_rank")
        if s.tf32_terms:
            self._rings_of_parts(b)
        else:
            if self.computed is None:
                self.a = self._ring(b, self.product.operands[0], 0, s.m)
                self.rings.append(self.a)
            else:
                self.computed.make_rings(b, s.stages)
            self.b = self._ring(b, self.product.operands[1], 1, s.n)
            self.rings.append(self.b)
            for product in self.products[1:]:
                self.rings.append(self._ring(b, product.operands[1], 1, s.n, self.rings[-1]))
        self.epilogue.outputs(b)
        if s.cluster_k > 1:
            count, dtype = self.rows * s.columns // GROUP, dtype_of(self.product.operands[2].type)
            self.shared_sum = ClusterSum(b, s, b.op("cluster_rank"), count, dtype)
        if s.stream_k:
            partials, flags = self.kernel.params[-2:]
            self.stream = StreamSum(s, partials, flags, self.rows * s.columns // GROUP)
        self.registers_of = _registers(s, self._is_involved(), self.epilogue.is_crowded())
        self.full = b.op("alloc", dtype=u64, shape=(s.stages,), space="shared", name="full")
        self.empty = b.op("alloc", dtype=u64, shape=(s.stages,), space="shared", name="empty")
        b.if_(b.op("eq", self.epilogue.thread, b.index(0)), self._initialise, lambda inner: [])
        clusters = s.cluster * s.cluster_k
        b.multi("cluster_sync" if clusters > 1 else "barrier")
        if s.pdl or s.split_k > 1:
            b.multi("release_next")
        is_copying = b.op("eq", self.epilogue.group, b.const(0, i32))
        b.if_(is_copying, self._copying, self._computing)
        if clusters > 1:
            b.multi("cluster_sync")  # nobody leaves while others still write to its memory
        attrs: dict[str, Attr] = {**self.kernel.attrs, "min_blocks": 1}
        if s.pdl or s.stream_k:
            attrs["dependent"] = True
        grid = self.kernel.grid
        if self.stream is not None:
            grid = (Size.of(self.stream.blocks),)
        if s.cluster_k > 1:
            attrs["cluster"] = s.cluster_k
            grid = (grid[0] * s.cluster_k, *grid[1:])
        body, kept = Block((), tuple(b.ops)), MappingProxyType(attrs)
        return replace(self.kernel, grid=grid, stage=Stage.THREAD, body=body, threads=s.threads, attrs=kept)

    def _initialise(self, b: Builder) -> list[Value]:
        for map_ in self._maps():
            b.multi("prefetch_map", map_)
        # Where warps read the tile themselves, each says that it has.
        readers = self.epilogue.shared_groups * self.schedule.cluster * (1 if self.computed is None else WGMMA_WARPS)
        for number in range(self.schedule.stages):
            b.multi("mbarrier_init", self.full, b.index(number), count=1)
            b.multi("mbarrier_init", self.empty, b.index(number), count=readers)
        self.epilogue.initialise_fetch(b)
        if self.shared_sum is not None:
            self.shared_sum.initialise(b)
        b.multi("fence_init")
        return []

    # -- operands -----------------------------------------------------------------------------------------------

    def _maps(self) -> list[Value]:
        raw = [] if self.computed is None else [ring.map for ring in self.computed.rings.values()]
        return [*raw, *(ring.map for ring in self.rings)]

    def _rings_of_parts(self, b: Builder) -> None:
        """Rings whose stages hold all parts of an operand, each of which is brought once and multiplied with several of the other's."""
        sides = [list(dict.fromkeys(p.operands[axis] for p in self.products)) for axis in (0, 1)]
        for axis, (parts, extent) in enumerate(zip(sides, (self.schedule.m, self.schedule.n), strict=True)):
            rings: list[_Ring] = []
            for part in parts:
                rings.append(self._ring(b, part, axis, extent, rings[-1] if rings else None, len(parts)))
            self.rings += rings
        self.a, self.b = self.rings[0], self.rings[len(sides[0])]
        self.pairs = [(sides[0].index(p.operands[0]), sides[1].index(p.operands[1])) for p in self.products]

    def _ring(self, b: Builder, operand: Value, tile_axis: int, extent: int, behind: _Ring | None = None, parts: int = 1) -> _Ring:
        """The ring of an operand; `behind`: it shares that of another. `parts`: so many tiles of one operand in a stage."""
        load = self.made[operand]
        if load.opcode == "load_image":
            return self._image_ring(b, load, extent, behind, parts)
        tensor = load.operands[0]
        assert load.opcode == "load" and isinstance(tensor.type, Tensor)
        s, size = self.schedule, self.dtype.itemsize
        row_axis, k_axis = self.epilogue.axes(load, tile_axis)
        rank = tensor.type.rank
        box = [1] * rank
        shape, strides = list(tensor.type.shape), list(tensor.type.strides)
        end = load.attrs.get("end")
        if isinstance(end, Size):
            shape[k_axis] = end
        blocked = False
        if k_axis == rank - 1:
            major = "k"
            box[k_axis], box[row_axis] = self.width, extent // (s.cluster if tile_axis == 0 else 1)
        else:
            major, wide = "mn", ROW_BYTES // size
            box[k_axis], box[row_axis] = s.k, wide
            blocked = divisors.of_size(shape[row_axis], self.kernel.facts) % wide == 0 and rank < 5 and s.cluster == 1
            if blocked:
                # An axis of its own for blocks of 64: one copy brings them all, block after block.
                blocks = floordiv(shape[row_axis], Size.of(wide))
                shape = [blocks, *shape[:row_axis], Size.of(wide)]
                strides = [Size.of(wide), *strides]
                box = [extent // wide, *box]
        name = "ab"[tile_axis]
        stage = extent * self.width * (s.horizontal if tile_axis == 1 else 1) * parts
        if behind is None:
            memory = b.op("alloc", dtype=self.dtype, shape=(s.stages * stage,), space="shared", align=1024, name=f"{name}.ring")
        else:
            memory = behind.memory
        found = b.op(
            "tensor_map", tensor, shape=tuple(shape), strides=tuple(strides), box=tuple(box), swizzle=ROW_BYTES, name=f"{name}.map",
            **self._rounding(),
        )  # fmt: skip
        first = 0 if behind is None else behind.first + extent * self.width
        return _Ring(load, memory, found, tile_axis, extent, major, blocked, stage, first)

    def _rounding(self) -> dict[str, Attr]:
        """Matrix units drop the bits of an f32 that tf32 lacks: the copy engine rounds."""
        return {"round": True} if self.dtype is f32 else {}

    def _image_ring(self, b: Builder, load: Op, extent: int, behind: _Ring | None, parts: int) -> _Ring:
        """The pixels of a convolution, which the copy engine finds itself."""
        s, tensor = self.schedule, load.operands[0]
        assert isinstance(tensor.type, Tensor)
        lower, steps = load.attrs["lower"], load.attrs["steps"]
        positions = [load.attrs[name] for name in ("planes", "rows", "columns") if name in load.attrs]
        assert isinstance(lower, tuple) and isinstance(steps, tuple)
        upper: list[Attr] = []
        for first, step, count, size in zip(lower, steps, positions, tensor.type.shape[1:-1], strict=True):
            assert isinstance(first, int) and isinstance(step, int) and isinstance(count, Size | int)
            # The last position, counted from the last element.
            upper.append((Size.of(count) - 1) * step + first - (size - 1))
        stage = extent * self.width * parts
        if behind is None:
            memory = b.op("alloc", dtype=self.dtype, shape=(s.stages * stage,), space="shared", align=1024, name="a.ring")
        else:
            memory = behind.memory
        found = b.op(
            "tensor_map", tensor, shape=tensor.type.shape, strides=tensor.type.strides, box=(*[1] * (tensor.type.rank - 1), self.width),
            swizzle=ROW_BYTES, pixels=extent, lower=lower, upper=tuple(upper), steps=steps, name="a.map", **self._rounding(),
        )  # fmt: skip
        return _Ring(load, memory, found, 0, extent, "k", False, stage, 0 if behind is None else behind.first + extent * self.width)

    def _is_involved(self) -> bool:
        """Whether the copying threads have more to compute than the corner of a matrix."""
        if self.schedule.bf16_terms:
            return self.skips  # which terms a step brings is a number of few registers
        if self.schedule.inner >= 0:
            return True
        loads = [*(ring.load for ring in self.rings), *(self.computed.rings if self.computed is not None else ())]
        return any(isinstance(load.operands[0].type, Tensor) and load.operands[0].type.rank > 3 for load in loads)

    # -- roles --------------------------------------------------------------------------------------------------

    def _copying(self, b: Builder) -> list[Value]:
        self.role = "copying"
        if self.registers_of is not None:
            b.multi("set_registers", count=self.registers_of[0], increase=False)
        number = b.cast(self.epilogue.warp, i32)
        first = b.op("eq", b.op("shuffle", number, b.const(0, i32), mode="idx"), b.const(0, i32))

        def one_thread(inner: Builder) -> list[Value]:
            if self.schedule.pdl:
                inner.multi("wait_previous")
            self._body(inner, self.kernel.body.ops, inner.const(0, u32))
            return []

        def one_warp(inner: Builder) -> list[Value]:
            inner.if_(inner.op("elect"), one_thread, lambda deep: [])
            return []

        b.if_(first, one_warp, lambda inner: [])
        return []

    def _computing(self, b: Builder) -> list[Value]:
        self.role = "computing"
        s = self.schedule
        if self.registers_of is not None:
            b.multi("set_registers", count=self.registers_of[1], increase=True)
        if s.pdl or s.stream_k:
            b.multi("wait_previous")  # what follows the sums reads and writes, too; flags must have been cleared
        start = self.tile_count = b.const(0, u32)
        if s.pingpong:
            # The second group lets the first one begin.
            mine = b.cast(self.epilogue.own, i32)
            self.turn, self.other_turn = b.add(mine, b.const(3, i32)), b.sub(b.const(4, i32), mine)
            second = b.op("eq", self.epilogue.own, b.index(1))
            b.if_(second, lambda inner: inner.multi("named_barrier", self.other_turn, threads=2 * GROUP, arrive=True), lambda inner: [])
        self._body(b, self.kernel.body.ops, start)
        if self.epilogue.out_maps:
            b.if_(self.epilogue.leader, lambda inner: inner.multi("tma_wait", pending=0, read=True), lambda inner: [])
        return []

    def _body(self, b: Builder, ops: Sequence[Op], position: Value) -> None:
        """The ops of a tile, or of the loop over tiles, in this role. `position` counts the steps taken so far."""
        before: list[Op] = []
        for number, op in enumerate(ops):
            if op.opcode == "for" and op.attrs.get("role") == "tiles":
                self.epilogue.ops(b, before)
                self._tiles(b, op)
                return
            if op is self.sum:
                self.epilogue.ops(b, before)
                if self.role == "copying":
                    self._copy_steps(b, position)
                else:
                    rest = [x for x in ops[number + 1 :] if x.opcode != "yield"]
                    self.epilogue.fetch_first(b, rest)
                    sums = self._multiply(b, position)
                    self._finish(b, rest, sums)
                return
            before.append(op)

    def _finish(self, b: Builder, ops: Sequence[Op], sums: Sequence[Value]) -> None:
        """What becomes of a tile's sums."""
        group, thread = b.cast(self.epilogue.own, u32), b.cast(b.op("and", self.epilogue.thread, b.index(GROUP - 1)), u32)
        if self.stream is not None:
            self._finish_stretch(b, self.stream, ops, sums, group, thread)
            return
        if self.shared_sum is None:
            self._hold(b, sums)
            self.epilogue.finish(b, ops, self.tile_count)
            return
        shared = self.shared_sum
        turn = self.tile_count

        def whole(inner: Builder) -> list[Value]:
            self._hold(inner, shared.collect(inner, group, thread, self.epilogue.leader, turn, sums))
            self.epilogue.finish(inner, ops, self.tile_count)
            return []

        def part(inner: Builder) -> list[Value]:
            shared.send(inner, group, thread, self.epilogue.leader, turn, sums)
            return []

        b.if_(shared.is_first, whole, part)

    def _finish_stretch(
        self, b: Builder, stream: StreamSum, ops: Sequence[Op], sums: Sequence[Value], group: Value, thread: Value
    ) -> None:
        def mine(inner: Builder) -> list[Value]:
            whole = inner.if_(
                stream.ends, lambda deep: list(sums), lambda deep: list(stream.collect(deep, group, thread, self.epilogue.leader, sums))
            )
            self._hold(inner, whole)
            self.epilogue.finish(inner, ops, self.tile_count)
            return []

        def anothers(inner: Builder) -> list[Value]:
            stream.give(inner, group, thread, self.epilogue.leader, sums)
            return []

        b.if_(stream.begins, mine, anothers)

    def _steps(self, b: Builder) -> Value:
        """How many steps of one tile's sum this block takes."""
        return self._stretch(b)[1]

    def _stretch(self, b: Builder) -> tuple[Value, Value]:
        """The first of them, and how many they are."""
        if self.stream is not None:
            return self.stream.first_step, self.stream.own_steps
        if self.skips:
            return self._counting_steps(b)
        steps = self._all_steps(b)
        return (b.const(0, u32), steps) if self.shared_sum is None else self.shared_sum.stretch(b, steps)

    @property
    def skips(self) -> bool:
        """Whether the tiles' sums differ in where they begin and end (`passes/windows/sum_ranges.py`)."""
        return bool(self.sum.attrs.get("skips"))

    def _counting_steps(self, b: Builder) -> tuple[Value, Value]:
        """The first step of a tile's sum that counts, and how many there are."""
        low, high = (self.env[v] for v in self.sum.operands[:2])
        assert isinstance(low, Value) and isinstance(high, Value)
        step = b.index(self.schedule.k)
        length = b.op("max", b.sub(high, low), b.index(0))
        steps = b.op("floordiv", b.add(length, b.index(self.schedule.k - 1)), step)
        return b.cast(b.op("floordiv", low, step), u32), b.cast(steps, u32)

    def _all_steps(self, b: Builder) -> Value:
        """How many steps the sum of one tile takes."""
        high = self.env[self.sum.operands[1]]
        assert isinstance(high, Value)
        return b.cast(b.op("floordiv", b.add(high, b.index(self.schedule.k - 1)), b.index(self.schedule.k)), u32)

    def _tiles(self, b: Builder, op: Op) -> None:
        low, high, step = (self.env[v] for v in op.operands[:3])
        assert isinstance(low, Value) and isinstance(high, Value) and isinstance(step, Value)
        if self.stream is not None:
            self._stretch_of_tiles(b, op, self.stream, high)
            return
        steps = self._steps_outside(b, op)
        position, advance = b.const(0, u32), steps
        if self.schedule.pingpong and self.role == "computing":
            low = b.add(low, b.mul(self.epilogue.own, step))
            position = b.mul(b.cast(self.epilogue.own, u32), steps)
            step = b.mul(step, b.index(self.schedule.math_warpgroups))
            advance = b.mul(steps, b.const(self.schedule.math_warpgroups, u32))
        region = op.regions[0]

        counted = self.role == "computing" and (self.shared_sum is not None or self.epilogue.fetched is not None)

        def body(inner: Builder, index: Value, current: Value, *count: Value) -> list[Value]:
            self.env[region.args[0]] = index
            if counted:
                (self.tile_count,) = count
            self._body(inner, region.ops, current)
            return [inner.add(current, advance), *(inner.add(c, inner.const(1, u32)) for c in count)]

        b.for_(low, high, step, [position, b.const(0, u32)] if counted else [position], body, name="tile", unroll=1)

    def _stretch_of_tiles(self, b: Builder, op: Op, stream: StreamSum, tiles: Value) -> None:
        """The tiles that this block's stretch of all steps touches."""
        self._sizes_outside(b, op)
        stream.lay_out(b, b.cast(tiles, u32), self._all_steps(b))
        region = op.regions[0]

        def body(inner: Builder, number: Value) -> list[Value]:
            self.env[region.args[0]] = inner.cast(number, dtype_of(region.args[0].type))
            position = stream.enter(inner, number)
            self._body(inner, region.ops, position)
            return []

        first, last = stream.tiles(b)
        b.for_(first, last, b.const(1, u32), [], body, name="tile", unroll=1)

    def _steps_outside(self, b: Builder, op: Op) -> Value:
        """The number of steps, computed before the loop over tiles: the sum's extent does not depend on the tile."""
        self._sizes_outside(b, op)
        return self._steps(b)

    def _sizes_outside(self, b: Builder, op: Op) -> None:
        for inner in op.regions[0].ops:
            if inner is self.sum:
                break
            if inner.opcode in ("size", "const"):
                self.epilogue.ops(b, [inner])

    def _ring_state(self, b: Builder, position: Value) -> tuple[Value, Value]:
        """The stage a step uses, and the parity of that use."""
        stages = b.const(self.schedule.stages, u32)
        stage = b.op("mod", position, stages)
        return stage, b.op("and", b.op("floordiv", position, stages), b.const(1, u32))

    def _next_state(self, b: Builder, stage: Value, parity: Value) -> tuple[Value, Value]:
        following = b.add(stage, b.const(1, u32))
        wraps = b.op("eq", following, b.const(self.schedule.stages, u32))
        return b.select(wraps, b.const(0, u32), following), b.select(wraps, b.op("xor", parity, b.const(1, u32)), parity)

    # -- copying ------------------------------------------------------------------------------------------------

    def _copy_steps(self, b: Builder, position: Value) -> None:
        s = self.schedule
        stage, parity = self._ring_state(b, position)
        (k_arg,) = self.sum.regions[0].args[:1]
        raw = {} if self.computed is None else self.computed.rings
        size = sum(ring.extent * self.width * self.dtype.itemsize for ring in self.rings) + sum(ring.bytes for ring in raw.values())
        loads = {ring.load: ring for ring in self.rings}
        needed = self._for_copies([*loads, *raw])
        first, steps = self._stretch(b)

        def step(inner: Builder, number: Value, stage: Value, parity: Value) -> list[Value]:
            inner.multi("mbarrier_wait", self.empty, stage, inner.op("xor", parity, inner.const(1, u32)))
            inner.multi("mbarrier_expect", self.full, stage, bytes=size)
            whole = inner.add(first, number) if self.shared_sum is not None or self.stream is not None or self.skips else number
            k = inner.mul(inner.cast(whole, dtype_of(k_arg.type)), inner.index(s.k))
            self.env[k_arg] = k
            self.divisors[k] = s.k
            for op in needed:
                if op in raw and self.computed is not None:
                    tensor = op.operands[0].type
                    assert isinstance(tensor, Tensor)
                    where = [self.epilogue.origin(self.env[v]) for v in op.operands[1 : 1 + tensor.rank]]
                    self.computed.copy(inner, raw[op], stage, self.full, where)
                elif op in loads:
                    self._copy(inner, loads[op], stage)
                else:
                    self.epilogue.ops(inner, [op])
            return list(self._next_state(inner, stage, parity))

        b.for_(b.const(0, u32), steps, b.const(1, u32), [stage, parity], step, name="step", unroll=1)

    def _for_copies(self, loads: Sequence[Op]) -> list[Op]:
        """The ops of a step that copying takes: what finds addresses, but not what computes on elements."""
        wanted = {v for load in loads for v in load.operands}
        found: list[Op] = []
        for op in reversed(self.sum.regions[0].ops):
            if op in loads:
                found.append(op)
            elif any(r in wanted for r in op.results):
                found.append(op)
                wanted.update(op.operands)
        return found[::-1]

    def _copy_image(self, b: Builder, ring: _Ring, stage: Value) -> None:
        """Where the tile's first pixel lies, and where in the kernel this step is."""
        row, *offsets, channel = (self.epilogue.origin(self.env[v]) for v in ring.load.operands[1:])
        offset = b.mul(stage, b.const(ring.stage, u32))
        offset = b.add(offset, b.const(ring.first, u32)) if ring.first else offset
        lower, steps = (ring.load.attrs[name] for name in ("lower", "steps"))
        assert isinstance(lower, tuple) and isinstance(steps, tuple)
        position = b.cast(row, u32)
        digits: list[Value] = []
        for count in (ring.load.attrs[name] for name in ("columns", "rows", "planes") if name in ring.load.attrs):
            assert isinstance(count, Size)
            divisor = b.cast(b.index(count), u32)
            quotient = b.op("floordiv", position, divisor)
            digits.append(b.cast(b.sub(position, b.mul(quotient, divisor)), i32))
            position = quotient
        base: list[Value] = []
        for digit, step, first in zip(reversed(digits), steps, lower, strict=True):
            assert isinstance(step, int) and isinstance(first, int)
            base.append(b.add(b.mul(digit, b.const(step, i32)), b.const(first, i32)))
        b.multi(
            "tma_load", ring.memory, offset, ring.map, self.full, stage, b.cast(position, i32), *base, channel, *offsets
        )

    def _copy(self, b: Builder, ring: _Ring, stage: Value) -> None:
        if ring.load.opcode == "load_image":
            self._copy_image(b, ring, stage)
            return
        tensor = ring.load.operands[0].type
        assert isinstance(tensor, Tensor)
        coordinates = [self.epilogue.origin(self.env[v]) for v in ring.load.operands[1 : 1 + tensor.rank]]
        offset = b.mul(stage, b.const(ring.stage, u32))
        offset = b.add(offset, b.const(ring.first, u32)) if ring.first else offset
        wide = ROW_BYTES // self.dtype.itemsize
        if self.rank is not None and ring is self.a:
            self._send_part(b, ring, stage, offset, coordinates)
            return
        if ring.major == "k":
            b.multi("tma_load", ring.memory, offset, ring.map, self.full, stage, *coordinates)
            return
        if ring.blocked:
            first = b.op("floordiv", coordinates[-1], b.index(wide))
            b.multi("tma_load", ring.memory, offset, ring.map, self.full, stage, first, *coordinates[:-1], b.index(0))
            return
        for block in range(ring.extent // wide):
            there = b.add(offset, b.const(block * wide * self.schedule.k, u32))
            column = b.add(coordinates[-1], b.index(block * wide))
            b.multi("tma_load", ring.memory, there, ring.map, self.full, stage, *coordinates[:-1], column)

    def _send_part(self, b: Builder, ring: _Ring, stage: Value, offset: Value, coordinates: list[Value]) -> None:
        """This block's part of the rows, for all blocks of the cluster."""
        assert self.rank is not None
        s = self.schedule
        part = ring.extent // s.cluster
        everyone = b.const((1 << s.cluster) - 1, i32)
        place = b.add(offset, b.mul(b.cast(self.rank, u32), b.const(part * s.k, u32)))
        row_axis, _ = self.epilogue.axes(ring.load, ring.tile_axis)
        first = b.add(coordinates[row_axis], b.mul(b.cast(self.rank, dtype_of(coordinates[row_axis].type)), b.index(part)))
        wide = part if ring.major == "k" else ROW_BYTES // self.dtype.itemsize
        for number in range(part // wide):
            there = b.add(place, b.const(number * wide * s.k, u32)) if number else place
            where = [*coordinates]
            where[row_axis] = b.add(first, b.index(number * wide)) if number else first
            b.multi("tma_load", ring.memory, there, ring.map, self.full, stage, *where, everyone, multicast=True)

    # -- multiplying --------------------------------------------------------------------------------------------

    def _multiply(self, b: Builder, position: Value) -> Sequence[Value]:
        """The sums of a tile, or this block's part of them."""
        s = self.schedule
        stage, parity = self._ring_state(b, position)
        accumulators = self.rows * s.columns // GROUP
        zero = b.const(0, dtype_of(self.product.operands[2].type))
        if self.computed is not None:
            self.computed.start(b)
        if s.pingpong:
            b.multi("named_barrier", self.turn, threads=2 * GROUP)
        rows = b.const(0, u32) if s.pingpong else b.mul(b.cast(self.epilogue.own, u32), b.const(self.rows * self.width, u32))

        def step(inner: Builder, number: Value, stage: Value, parity: Value, previous: Value, *sums: Value) -> list[Value]:
            inner.multi("mbarrier_wait", self.full, stage, parity)
            first = inner.add(inner.mul(stage, inner.const(self.a.stage, u32)), rows)
            second = inner.mul(stage, inner.const(self.b.stage, u32))
            sums = inner.emit("wgmma", (self.a.memory, first, self.b.memory, second, *sums), self._instructions())
            sums = inner.multi("wgmma_wait", *sums, pending=s.mma_in_flight)
            later = inner.op("ne", number, inner.const(0, u32)) if s.mma_in_flight else None
            self._release(inner, later, previous if s.mma_in_flight else stage)
            return [*self._next_state(inner, stage, parity), stage, *sums]

        def stretch(inner: Builder, count: Value, stage: Value, parity: Value) -> tuple[Value, Value, list[Value]]:
            """So many steps from zero, and the stage behind them."""
            start = [stage, parity, stage, *[zero] * accumulators]
            stage, parity, last, *sums = inner.for_(inner.const(0, u32), count, inner.const(1, u32), start, step, name="step", unroll=1)
            if not s.chunk:
                hand_over(inner)
            if s.mma_in_flight:
                sums = list(inner.multi("wgmma_wait", *sums, pending=0))
                self._release(inner, None, last)
            return stage, parity, sums

        def in_chunks(inner: Builder, number: Value, stage: Value, parity: Value, *totals: Value) -> list[Value]:
            count = inner.op("min", inner.sub(steps, number), inner.const(s.chunk // s.k, u32))
            stage, parity, sums = stretch(inner, count, stage, parity)
            return [stage, parity, *(inner.add(total, part) for total, part in zip(totals, sums, strict=True))]

        def step_from_zero(inner: Builder, number: Value, stage: Value, parity: Value, *totals: Value) -> list[Value]:
            """A step that is a chunk: its first instruction begins with nothing."""
            inner.multi("mbarrier_wait", self.full, stage, parity)
            first = inner.add(inner.mul(stage, inner.const(self.a.stage, u32)), rows)
            second = inner.mul(stage, inner.const(self.b.stage, u32))
            sums = inner.emit("wgmma", (self.a.memory, first, self.b.memory, second), {**self._instructions(), "fresh": True})
            sums = inner.multi("wgmma_wait", *sums, pending=0)
            self._release(inner, None, stage)
            return [*self._next_state(inner, stage, parity), *(inner.add(total, part) for total, part in zip(totals, sums, strict=True))]

        def all_steps(inner: Builder) -> list[Value]:
            if s.chunk == s.k and self.rows == 64:
                begun = [stage, parity, *[zero] * accumulators]
                _, _, *totals = inner.for_(inner.const(0, u32), steps, inner.const(1, u32), begun, step_from_zero, name="step", unroll=1)
                hand_over(inner)
                return totals
            if not s.chunk:
                return stretch(inner, steps, stage, parity)[2]
            # The first chunk stands for what there is to add to.
            start = stretch(inner, inner.op("min", steps, inner.const(s.chunk // s.k, u32)), stage, parity)
            each = inner.const(s.chunk // s.k, u32)
            _, _, *totals = inner.for_(each, steps, each, [*start[:2], *start[2]], in_chunks, name="chunk", unroll=1)
            hand_over(inner)
            return totals

        def hand_over(inner: Builder) -> None:
            """The other group may start its instructions: these are all on their way."""
            if s.pingpong:
                inner.multi("named_barrier", self.other_turn, threads=2 * GROUP, arrive=True)

        def nothing(inner: Builder) -> list[Value]:
            hand_over(inner)
            return [zero] * accumulators

        # An empty sum stands apart: nothing but matrix instructions may touch accumulators between the first of them and the wait.
        steps = self._steps(b)
        if self.computed is not None:
            start = [zero] * accumulators
            found = b.if_(
                b.op("gt", steps, b.const(0, u32)), lambda inner: self._from_registers(inner, steps, stage, parity, start),
                lambda inner: start,
            )  # fmt: skip
            hand_over(b)
            return found
        return b.if_(b.op("gt", steps, b.const(0, u32)), all_steps, nothing)

    def _hold(self, b: Builder, sums: Sequence[Value]) -> None:
        shape = (self.schedule.m, self.schedule.n)
        for number, result in enumerate(self.sum.results):
            self.env[result] = Registers(shape, self._cells_of(b, shape, sums, number))

    def _from_registers(self, b: Builder, steps: Value, stage: Value, parity: Value, sums: Sequence[Value]) -> list[Value]:
        """All steps with the first operand in registers. The words of an instruction are computed while those before it run, of this step and
        of the one before. Running instructions go on reading their words' registers: two steps stand side by side in the loop, each with
        registers of its own, and each waits for the other's instructions before it computes words again. A last odd step stands apart."""
        operand = self.computed
        assert operand is not None
        one, two, kind = b.const(1, u32), b.const(2, u32), dtype_of(self.sum.regions[0].args[0].type)
        last = b.sub(steps, one)

        def first_of(inner: Builder, number: Value) -> Value:
            return inner.mul(inner.cast(number, kind), inner.index(self.schedule.k))

        def step(
            inner: Builder, number: Value, stage: Value, parity: Value, before: tuple[Value | None, Value], fetched: Sequence[Value],
            sums: Sequence[Value], pending: int,
        ) -> tuple[list[Value], list[Value], list[Value]]:  # fmt: skip
            k = first_of(inner, number)
            coming = operand.fetch(inner, first_of(inner, inner.op("min", inner.add(number, one), last)))
            inner.multi("mbarrier_wait", self.full, stage, parity)
            for chunk in range(operand.chunks):
                words = operand.words(inner, k, operand.read(inner, stage, chunk), fetched, chunk)
                sums = self._started(inner, chunk, stage, words, sums)
            sums = inner.multi("wgmma_wait", *sums, pending=pending)
            self._release(inner, *before)
            return list(self._next_state(inner, stage, parity)), coming, list(sums)

        def pair(inner: Builder, number: Value, stage: Value, parity: Value, previous: Value, *carried: Value) -> list[Value]:
            later = inner.op("ne", number, inner.const(0, u32))
            fetched, sums = carried[:held], carried[held:]
            state, coming, total = step(inner, number, stage, parity, (later, previous), fetched, sums, operand.chunks)
            second, number = state[0], inner.add(number, one)
            state, coming, total = step(inner, number, second, state[1], (None, stage), coming, total, operand.chunks)
            return [*state, second, *coming, *total]

        fetched = operand.fetch(b, first_of(b, b.const(0, u32)))
        held = len(fetched)
        whole = b.mul(b.op("floordiv", steps, two), two)

        def pairs(inner: Builder) -> list[Value]:
            start = [stage, parity, stage, *fetched, *sums]
            found = inner.for_(inner.const(0, u32), whole, two, start, pair, name="step", unroll=1)
            total = inner.multi("wgmma_wait", *found[3 + held :], pending=0)
            self._release(inner, None, found[2])
            return [*found[:2], *found[3 : 3 + held], *total]

        # As an empty sum, so none but an odd step: accumulators are only joined where nothing runs.
        stage, parity, *carried = b.if_(b.op("gt", whole, b.const(0, u32)), pairs, lambda inner: [stage, parity, *fetched, *sums])
        fetched, sums = carried[:held], carried[held:]

        def odd(inner: Builder) -> list[Value]:
            _, _, total = step(inner, last, stage, parity, (None, stage), fetched, sums, 0)
            return total

        return list(b.if_(b.op("ne", whole, steps), odd, lambda inner: sums))

    def _started(self, b: Builder, chunk: int, stage: Value, words: Sequence[Value], sums: Sequence[Value]) -> tuple[Value, ...]:
        """The matrix instructions of one piece of a step."""
        s, size = self.schedule, self.dtype.itemsize
        wide = ROW_BYTES // size
        inside = chunk * (32 // size) * (1 if self.b.major == "k" else wide)
        steps = tuple((4 * block, inside, block * s.n // 2) for block in range(self.rows // 64))
        attrs: dict[str, Attr] = {
            "dtype": self.dtype, "words": len(words), "n": s.n, "k": 32 // size, "steps": steps, "b_major": self.b.major,
        }  # fmt: skip
        if self.b.major == "mn":
            attrs["b_block"] = s.k * wide
        second = b.mul(stage, b.const(s.n * s.k, u32))
        return b.emit("wgmma_registers", (*words, self.b.memory, second, *sums), attrs)

    def _cells_of(self, b: Builder, shape: Shape, sums: Sequence[Value], product: int) -> dict[Cell, Value]:
        """Accumulators as registers of a product's tile: two neighbours along n each."""
        rows, columns = self.epilogue.layout.registers(shape)
        s = self.schedule
        cells: dict[Cell, Value] = {}
        for row in range(rows):
            for column in range(columns):
                first = row // 2 * (s.columns // 2) + product * (s.n // 2) + 4 * column + 2 * (row % 2)
                cells[row, column] = b.op("pack", sums[first], sums[first + 1])
        return cells

    def _instructions(self) -> dict[str, Attr]:
        """The matrix instructions of one step of one group."""
        s = self.schedule
        k = 32 // self.dtype.itemsize
        steps: list[Attr] = []
        for pair in self.pairs:
            parts = [part * ring.extent * self.width for part, ring in zip(pair, (self.a, self.b), strict=True)]
            for number in range(s.k // k):
                inside = [number * k * (1 if ring.major == "k" else ROW_BYTES // self.dtype.itemsize) for ring in (self.a, self.b)]
                for block in range(self.rows // 64):
                    steps.append((parts[0] + inside[0] + block * 64 * self.width, parts[1] + inside[1], block * s.columns // 2))
        attrs: dict[str, Attr] = {"n": s.columns, "k": k, "steps": tuple(steps)}
        for name, ring in (("a", self.a), ("b", self.b)):
            attrs[f"{name}_major"] = ring.major
            if ring.major == "mn":
                attrs[f"{name}_block"] = s.k * (ROW_BYTES // self.dtype.itemsize)
        return attrs

    def _release(self, b: Builder, condition: Value | None, stage: Value) -> None:
        """This group has read the stage. In a cluster one thread tells each block."""
        if self.computed is not None:
            first = b.op("eq", self.epilogue.lane, b.index(0))
            first = first if condition is None else b.logical_and(first, condition)
            b.if_(first, lambda inner: inner.multi("mbarrier_arrive", self.empty, stage), lambda inner: [])
            return
        if self.rank is None:
            mine = self.epilogue.leader if condition is None else b.logical_and(self.epilogue.leader, condition)
            b.if_(mine, lambda inner: inner.multi("mbarrier_arrive", self.empty, stage), lambda inner: [])
            return
        number = b.cast(b.op("and", self.epilogue.thread, b.index(GROUP - 1)), i32)
        mine = b.op("lt", number, b.const(self.schedule.cluster, i32))
        mine = mine if condition is None else b.logical_and(mine, condition)
        b.if_(mine, lambda inner: inner.multi("mbarrier_arrive", self.empty, stage, number, remote=True), lambda inner: [])

def _registers(schedule: Wgmma, involved: bool, crowded: bool) -> tuple[int, int] | None:
    """Registers of a copying and of a computing thread: together as many as the block was given. None where there are enough for all.
    `involved`: finding the addresses takes some. A thread that uses more than it was left with is stopped by the hardware."""
    if schedule.math_warpgroups == 1 or schedule.math_warpgroups > 3:
        return None
    if schedule.math_warpgroups >= 3:
        return (56, 152) if involved else (32, 160)
    rows = schedule.m // (1 if schedule.pingpong else schedule.math_warpgroups)
    if rows * schedule.columns // GROUP >= 192:
        return (40, 232) if involved else (24, 240)
    if crowded and not schedule.pingpong:
        return 40, 200  # with more of them ptxas keeps more in flight than fits, and spills
    return (56, 224) if involved else (40, 232)
