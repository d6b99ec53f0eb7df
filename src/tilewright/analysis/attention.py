"""Recognise attention, dependent reductions that one pass can compute: a maximum, sums of exponentials below it, and weighted sums.

`find_attention(kernel)` looks at a loop-stage kernel, never at what its author called it. In

    parallel batch…, i { m = max_j f(i, j); l = sum_j exp(f(i, j) - m); for e { o = sum_j exp(f(i, j) - m) * v(j, e); finish(m,
    l, o) } }

f is any elementwise function of one inner product `sum_d q(i, d) * k(j, d)` and of the indices: scaled, biased, masked. The
text computes it anew for every reduction; that it is the same is seen by comparing expressions, in which sums and products may
be written in any order. The index e may be a loop inside or one of the parallel indices. A condition around the terms (`if j <=
i`, `range(i + 1)`), or a `where(…, f, -inf)` as the last thing done to f, is taken apart: limits of j that rise with i are
known as such, so that what lies beyond them need not be computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import field, replace

from tilewright.analysis.affine import Affine, Forms, analyse, gap
from tilewright.analysis.expressions import ExpressionTable, Key, sorted_keys
from tilewright.base.dtypes import DType, f32
from tilewright.base.record import record
from tilewright.base.sizes import ONE, ZERO, Size, minimum
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.types import Tensor, dtype_of

_ELEMENTWISE = frozenset({"cast", "bitcast", "mul", "add", "sub", "or", "and", "shl", "shr", "neg", "select", "lt", "const"})
"""What an element may be computed by."""


def _is_byte(dtype: DType) -> bool:
    return dtype.is_int and dtype.itemsize == 1


@record
class Scale:
    """A factor of a weighted sum that is the same for all its terms."""

    value: Value
    divides: bool


@record
class Attention:
    """`row` and `batch` are positions among the parallel indices."""

    parallel: Op
    extents: tuple[Size, ...]
    row: int
    batch: tuple[int, ...]
    column: Value
    """The index along the values' columns: a parallel one, or that of `loop`."""
    column_extent: Size
    loop: Op | None
    keys: Size
    """How many terms a reduction has, where no limit ends it before."""
    depth: Size
    """Terms of the inner product."""
    maximum: Op
    sums: tuple[Op, ...]
    weighted: Op
    score: Op
    """The inner product in the body of `maximum`; `query` and `key` are the loads it multiplies, `value` the one of the
    weighted sum. A key or a value may be computed from numbers of 8 bits, as elements of packed blocks are: then it is the last op of that."""
    query: Op
    key: Op
    value: Op
    term: Value
    """f, in the body of `maximum`, without its conditions."""
    conditions: tuple[Value, ...]
    """Further conditions, in the body of `maximum`, under which a term counts."""
    reach: Size | None
    """Terms count for j < i + reach; with a grain, for j < i // grain * grain + reach."""
    grain: int
    strict: bool
    """Terms that do not count are left out by the text; otherwise they are exponentials of -inf, which matters for rows that
    have no others."""
    scales: tuple[Scale, ...]
    shifted: bool
    """0 is subtracted where the maximum is -inf: the sums of such rows are 0."""
    exponential: str
    forms: Forms
    count: Value | None = None
    """How many terms a reduction has, where that is no size: a number in memory, or one that a row adds something to. `keys` is then how
    many there are to read."""
    gathers: bool = False
    """The rows of an operand are not those of one axis: the tokens and heads of several queries, or keys in pages."""
    made: Mapping[Value, Op] = field(default_factory=dict, compare=False)
    """The op that makes each value of the kernel."""

    def loads(self, operand: Op) -> list[Op]:
        """What an operand is read by: it is a load itself, or computed from several."""
        return loads_of(operand, self.made)

    @property
    def computed(self) -> bool:
        """Whether keys or values are computed from what is read."""
        return any(op.opcode != "load" for op in (self.key, self.value))

    @property
    def indices(self) -> tuple[Value, ...]:
        return self.parallel.regions[0].args

    def start(self, b: Builder, i: Value) -> Value:
        """Of a row or rows, what `reach` counts from."""
        if self.grain == 1:
            return i
        grain = b.like(b.index(self.grain), i)
        return b.mul(b.op("floordiv", i, grain), grain)

    @property
    def j(self) -> Value:
        return self.maximum.regions[0].args[0]

    def axis(self, operand: Op, index: Value) -> int:
        """The axis of an operand's tensor that walks an index by ones, the same of all its loads; -1 where there is none, or more than one."""
        axes = {self._axis(load, index) for load in self.loads(operand)}
        return axes.pop() if len(axes) == 1 else -1

    def _axis(self, load: Op, index: Value) -> int:
        tensor = load.operands[0].type
        assert isinstance(tensor, Tensor)
        found = [a for a, v in enumerate(load.operands[1 : 1 + tensor.rank]) if self.forms[v].factor(index) != ZERO]
        if len(found) != 1:
            return -1
        form = self.forms[load.operands[1 + found[0]]]
        return found[0] if form.factor(index) == ONE else -1


def loads_of(operand: Op, made: Mapping[Value, Op]) -> list[Op]:
    """The loads that an element is computed from, without those of its indices; the op itself where it is one."""
    if operand.opcode == "load":
        return [operand]
    found: dict[int, Op] = {}
    waiting = list(operand.operands)
    while waiting:
        op = made.get(waiting.pop())
        if op is not None and op.opcode == "load":
            found[id(op)] = op
        elif op is not None:
            waiting += op.operands
    return list(found.values())


def find_attention(kernel: Kernel) -> Attention | None:
    """The attention the kernel is, or None."""
    found = _attention_or_reason(kernel)
    return found if isinstance(found, Attention) else None


def attention_refusal(kernel: Kernel) -> str:
    """Why the kernel is no attention, as the end of a sentence; empty where it is."""
    found = _attention_or_reason(kernel)
    return "" if isinstance(found, Attention) else found


def _attention_or_reason(kernel: Kernel) -> Attention | str:
    parallels = [op for op in kernel.body.ops if op.opcode == "parallel"]
    if len(parallels) != 1:
        return "its loops are several nests"
    region = parallels[0].regions[0]
    if any(op.opcode == "while" for op in walk(region)):
        return "a while loop stands in it"
    if sum(1 for op in region.ops if op.opcode == "reduce") < 2:
        return "its sums are not reductions over whole rows: a loop carries something else from term to term, or a condition stands around them"
    finder = _AttentionFinder(kernel, parallels[0])
    return finder.find() or finder.reason


class _AttentionFinder(ExpressionTable):
    def __init__(self, kernel: Kernel, parallel: Op) -> None:
        super().__init__(kernel)
        self.kernel, self.parallel = kernel, parallel
        self.forms = analyse(kernel)
        self.indices = parallel.regions[0].args
        self.used: dict[Value, frozenset[Value]] = {}
        self.leaves = {a for op in walk(kernel.body) for region in op.regions for a in region.args}
        self.written = {op.operands[0] for op in walk(kernel.body) if op.opcode == "store"}
        self.reason = "its parts do not fit together as scores, weights and weighted values"
        """Why `find` found none."""

    def _refuse(self, reason: str) -> Attention | None:
        self.reason = reason
        return None

    # -- the whole ----------------------------------------------------------------------------------------------

    def find(self) -> Attention | None:
        region = self.parallel.regions[0]
        loops = [op for op in region.ops if op.opcode == "for"]
        loop = loops[0] if loops else None
        if len(loops) > 1 or (loop is not None and (not loop.attrs.get("independent") or len(loop.operands) != 3)):
            return self._refuse("several loops, or one that runs in order, stand beside its sums")
        inside = loop.regions[0].ops if loop is not None else ()
        if any(op.regions and op.opcode != "reduce" and op is not loop for op in (*region.ops, *inside)):
            return self._refuse("its result is stored, or something else is computed, under a condition")
        reductions = [op for op in (*region.ops, *inside) if op.opcode == "reduce"]
        if any(len(op.operands) != 1 or len(op.results) != 1 or dtype_of(op.results[0].type) is not f32 for op in reductions):
            return self._refuse("a sum runs over several loops, or is kept in another dtype than f32")
        maxima = [op for op in reductions if op.attrs["kind"] == "max"]
        if len(maxima) != 1 or any(op.attrs["kind"] != "add" for op in reductions if op is not maxima[0]):
            return self._refuse("it does not subtract one maximum of the scores before it takes exponentials")
        return self._attention(maxima[0], [op for op in reductions if op is not maxima[0]], loop)

    def _attention(self, maximum: Op, others: Sequence[Op], loop: Op | None) -> Attention | None:
        for op in (maximum, *others):
            self.names[op.regions[0].args[0]] = "j"
            self.opaque.add(op.results[0])
        extents = self._sizes(self.parallel.operands)
        if extents is None:
            return None
        term, guards = self._peel(maximum.regions[0].yields[0], -math.inf, "if")
        guard_keys = {self.key(g) for g in guards}
        span = self.key(maximum.operands[0])
        sums: list[Op] = []
        weighted: list[tuple[Op, Op, tuple[Scale, ...]]] = []
        exponential = ""
        shifted: set[bool] = set()
        for op in others:
            value, own = self._peel(op.regions[0].yields[0], 0.0, "if")
            factors = self._factors(value)
            exponents = [f for f in factors if not f.divides and self._is_exponential(f.value, term, maximum)]
            if len(exponents) != 1 or {self.key(g) for g in own} != guard_keys or self.key(op.operands[0]) != span:
                return self._refuse("the maximum and the sums do not have the same terms, under the same conditions, over the same range")
            made = self.made[exponents[0].value]
            if exponential not in ("", made.opcode):
                return None
            exponential = made.opcode
            shifted.add(self._is_shifted(exponents[0].value, maximum))
            rest = [f for f in factors if f is not exponents[0]]
            j = op.regions[0].args[0]
            moving = [f for f in rest if j in self.depends(f.value)]
            if not rest:
                sums.append(op)
            elif len(moving) == 1 and not moving[0].divides and (load := self._element(moving[0].value)) is not None:
                weighted.append((op, load, tuple(f for f in rest if f is not moving[0])))
            else:
                return self._refuse("the values that are weighted are computed, not elements of an array")
        if len(weighted) != 1 or not exponential or len(shifted) != 1:
            return None
        term, soft = self._peel(term, -math.inf, "select")
        score = self._score(term, maximum)
        if score is None:
            return self._refuse("a score is not one inner product of a query's and a key's elements")
        return self._assemble(maximum, sums, weighted[0], loop, extents, term, guards, soft, score, exponential, shifted.pop())

    def _assemble(
        self, maximum: Op, sums: Sequence[Op], weighted: tuple[Op, Op, tuple[Scale, ...]], loop: Op | None,
        extents: tuple[Size, ...], term: Value, guards: Sequence[Value], soft: Sequence[Value], score: tuple[Op, Op, Op], exponential: str,
        shifted: bool,
    ) -> Attention | None:  # fmt: skip
        product, query, key = score
        total, value, scales = weighted
        j, j_value = maximum.regions[0].args[0], total.regions[0].args[0]
        rows = [p for p, i in enumerate(self.indices) if i in self.depends(query.result) and i not in self.depends(key.result)]
        rows = [p for p in rows if self.indices[p] not in self.depends(value.result)]
        depth = self._sizes(product.operands)
        if not rows or depth is None or len(depth) != 1:
            return None
        row = rows[-1]
        i = self.indices[row]
        column, column_extent, column_position = self._column(loop, key, value, extents, i)
        if column is None or column_extent is None:
            return None
        uses = {v for op in (query, key) for v in self.depends(op.result)}
        if column in uses or any(column in self.depends(op.results[0]) for op in (maximum, *sums)):
            return None
        extent = maximum.operands[0]
        bound = self._bound(extent, i)
        count = extent if bound is None else None
        if count is not None and (column in self.depends(count) or self.reads_of(count) & self.written):
            return self._refuse("where a row ends is not known before it is computed")
        keys, reach, grain = bound if bound is not None else (None, None, 1)
        strict = reach is not None or count is not None
        others: list[Value] = []
        for group, hard in ((guards, True), (soft, False)):
            for part in self._parts(group):
                limit = self._limit(part, i, j)
                if limit is not None and reach is None:
                    reach, strict = limit, hard
                else:
                    others.append(part)
                    strict = strict or hard
        if guards and soft:
            return None
        batch = tuple(p for p in range(len(self.indices)) if p not in (row, column_position))
        keys = keys if keys is not None else self._rows_of(key, j)
        if keys is None:
            return self._refuse("its keys are not the rows of an array")
        found = Attention(
            self.parallel, extents, row, batch, column, column_extent, loop, keys, depth[0], maximum, tuple(sums), total, product,
            query, key, value, term, tuple(others), reach, grain, strict, scales, shifted, exponential,
            self.forms, count, made=self.made,
        )  # fmt: skip
        d = product.regions[0].args[0]
        if any(op.opcode == "load" and found.axis(op, index) < 0 for op, index in ((query, d), (key, d), (value, column))):
            return None
        if min(found.axis(query, i), found.axis(key, j), found.axis(value, j_value)) < 0:
            found = replace(found, gathers=True)
        fixed = {self.indices[p] for p in batch}
        wanted = ((query, {i, d}), (key, {j, d}), (value, {j_value, column}))
        if any(not self.depends(op.result) <= moving | fixed for op, moving in wanted):
            return None
        return found

    def _rows_of(self, key: Op, j: Value) -> Size | None:
        """Where every row ends by its own limit: as many terms as there are to read."""
        load = loads_of(key, self.made)[0]
        tensor = load.operands[0].type
        assert isinstance(tensor, Tensor)
        indices = load.operands[1 : 1 + tensor.rank]
        walks = [a for a, v in enumerate(indices) if self.forms[v].factor(j) != ZERO]
        if walks:
            return tensor.shape[walks[0]]
        pages = [size for v in indices if (size := self._pages(v, j)) is not None]
        return pages[0] if pages else None

    def _pages(self, index: Value, j: Value) -> Size | None:
        """Of an index `table[…, j // P]`: as many terms as the table has room for."""
        op = self.made.get(index)
        while op is not None and op.opcode == "cast":
            op = self.made.get(op.operands[0])
        if op is None or op.opcode != "load":
            return None
        table = op.operands[0].type
        assert isinstance(table, Tensor)
        for extent, place in zip(table.shape, op.operands[1:], strict=False):
            made = self.made.get(place)
            if made is None or made.opcode != "floordiv" or self.forms[made.operands[1]].factors:
                continue
            if self.forms[made.operands[0]].factor(j) == ONE:
                return extent * self.forms[made.operands[1]].constant
        return None

    def reads_of(self, value: Value) -> set[Value]:
        """The arrays a value is read from."""
        found: set[Value] = set()
        waiting = [value]
        while waiting:
            op = self.made.get(waiting.pop())
            if op is None:
                continue
            found.update([op.operands[0]] if op.opcode == "load" else ())
            waiting += op.operands
        return found

    def _column(
        self, loop: Op | None, key: Op, value: Op, extents: tuple[Size, ...], row: Value
    ) -> tuple[Value | None, Size | None, int]:
        """The index along the values' columns, its extent, and its position among the parallel ones (-1: a loop's)."""
        if loop is not None:
            low, high, step = (self.forms[v] for v in loop.operands)
            if low.factors or high.factors or step.factors or low.constant != ZERO or step.constant != ONE:
                return None, None, -1
            return loop.regions[0].args[0], high.constant, -1
        if value.opcode != "load":
            found = [p for p, v in enumerate(self.indices) if v is not row and v in self.depends(value.result) and v not in self.depends(key.result)]
            return (self.indices[found[0]], extents[found[0]], found[0]) if len(found) == 1 else (None, None, -1)
        tensor = value.operands[0].type
        assert isinstance(tensor, Tensor)
        for index, stride in zip(value.operands[1 : 1 + tensor.rank], tensor.strides, strict=True):
            for position, own in enumerate(self.indices):
                if stride == ONE and own is not row and self.forms[index].factor(own) == ONE:
                    return own, extents[position], position
        return None, None, -1

    # -- parts of it ----------------------------------------------------------------------------------------------

    def _sizes(self, values: Sequence[Value]) -> tuple[Size, ...] | None:
        forms = [self.forms[v] for v in values]
        return None if any(f.factors for f in forms) else tuple(f.constant for f in forms)

    def _peel(self, value: Value, otherwise: float, opcode: str) -> tuple[Value, list[Value]]:
        """What a value is under conditions outside of which it is a constant."""
        conditions: list[Value] = []
        while (op := self.made.get(value)) is not None and op.opcode == opcode:
            if opcode == "if":
                position = op.results.index(value)
                inner, other = (region.yields[position] for region in op.regions)
                if any(x.opcode in ("store", "atomic", "accumulate") for region in op.regions for x in walk(region)):
                    break
            else:
                inner, other = op.operands[1:]
            if not self._is_constant(other, otherwise):
                break
            conditions.append(op.operands[0])
            value = inner
        return value, conditions

    def _parts(self, conditions: Sequence[Value]) -> list[Value]:
        """Conditions, conjunctions taken apart."""
        found: list[Value] = []
        waiting = list(conditions)
        while waiting:
            value = waiting.pop(0)
            op = self.made.get(value)
            if op is not None and op.opcode == "and":
                waiting = [*op.operands, *waiting]
            elif op is not None and op.opcode == "if" and self._is_constant(op.regions[1].yields[op.results.index(value)], False):
                # `a and b` of a text: b is looked at only where a holds.
                waiting = [op.operands[0], op.regions[0].yields[op.results.index(value)], *waiting]
            else:
                found.append(value)
        return found

    def _limit(self, condition: Value, i: Value, j: Value) -> Size | None:
        """`reach` of a condition that says j < i + reach."""
        op = self.made.get(condition)
        distance = gap(op, self.forms) if op is not None else None
        if distance is None or set(distance.values) != {i, j} or distance.factor(i) != ONE or distance.factor(j) != Size.of(-1):
            return None
        return distance.constant + 1

    def _bound(self, extent: Value, i: Value) -> tuple[Size | None, Size | None, int] | None:
        """Of a reduction's extent: the number of terms, or the limit it is, and the grain of that."""
        op = self.made.get(extent)
        if op is not None and op.opcode == "max" and self._is_constant(op.operands[1], 0):
            extent = op.operands[0]
        form = self.forms[extent]
        if not form.factors:
            return form.constant, None, 1
        if form.values == (i,) and form.factor(i) == ONE:
            return None, form.constant, 1
        grain = self._grain(form, i)
        if grain:
            return None, form.constant, grain
        op = self.made.get(extent)
        if op is None or op.opcode != "min":
            return None
        # The end of a slice: that of the array, or the row's own.
        bounds = [self._bound(v, i) for v in op.operands]
        known = [b for b in bounds if b is not None]
        sizes, reaches = [b[0] for b in known if b[0] is not None], [(b[1], b[2]) for b in known if b[1] is not None]
        if len(known) != 2 or not sizes or len(reaches) > 1:
            return None
        keys = sizes[0] if len(sizes) == 1 else minimum(sizes[0], sizes[1])
        return keys, *(reaches[0] if reaches else (None, 1))

    def _grain(self, form: Affine, i: Value) -> int:
        """g of a form g * (i // g) + constant; 0 of others."""
        op = self.made.get(form.values[0]) if len(form.values) == 1 else None
        if op is None or op.opcode != "floordiv" or op.operands[0] is not i:
            return 0
        by = self.forms[op.operands[1]]
        number = by.constant.constant
        return number if not by.factors and number is not None and number > 0 and form.factor(form.values[0]) == by.constant else 0

    def _score(self, term: Value, maximum: Op) -> tuple[Op, Op, Op] | None:
        """The inner product f is made of, and the loads it multiplies: that of the rows, that of the terms."""
        products: list[Op] = []
        waiting, seen = [term], set()
        while waiting:
            value = waiting.pop()
            op = self.made.get(value)
            if op is None or value in seen:
                continue
            seen.add(value)
            if op.opcode == "reduce":
                products.append(op)
                continue
            if op.regions or op is maximum:
                return None
            waiting += op.operands
        if len(products) != 1 or products[0].attrs["kind"] != "add" or len(products[0].regions[0].args) != 1:
            return None
        (product,) = products
        if dtype_of(product.results[0].type) is not f32:
            return None
        op = self.made.get(product.regions[0].yields[0])
        if op is None or op.opcode != "mul":
            return None
        loads = [self._element(v) for v in op.operands]
        first, second = loads
        if first is None or second is None:
            return None
        j = maximum.regions[0].args[0]
        if j in self.depends(first.result):
            first, second = second, first
        if first.opcode != "load" or j in self.depends(first.result) or j not in self.depends(second.result):
            return None
        return product, first, second

    def _element(self, value: Value) -> Op | None:
        """The load a value is, or the op that computes it from elements of which some have 8 bits."""
        load = self._load(value)
        if load is not None:
            return load
        op = self.made.get(value)
        waiting = [value]
        while waiting:
            own = self.made.get(waiting.pop())
            if own is None or own.regions or (own.opcode == "load" and own.attrs.get("masked")):
                return None
            if own.opcode != "load":
                if own.opcode not in _ELEMENTWISE:
                    return None
                waiting += own.operands
        if op is None or dtype_of(value.type) is not f32:
            return None
        loads = loads_of(op, self.made)
        return op if any(_is_byte(dtype_of(x.result.type)) for x in loads) else None

    def _load(self, value: Value) -> Op | None:
        """The load a value is, but for casts that widen it."""
        op = self.made.get(value)
        while op is not None and op.opcode == "cast" and dtype_of(value.type) is f32 and dtype_of(op.operands[0].type).is_float:
            value = op.operands[0]
            op = self.made.get(value)
        return op if op is not None and op.opcode == "load" and not op.attrs.get("masked") else None

    def _factors(self, value: Value) -> list[Scale]:
        op = self.made.get(value)
        if op is not None and op.opcode == "mul" and not ("packed" in op.attrs or self._element(value) is not None):
            return [*self._factors(op.operands[0]), *self._factors(op.operands[1])]
        if op is not None and op.opcode == "div":
            return [*self._factors(op.operands[0]), Scale(op.operands[1], True)]
        return [Scale(value, False)]

    def _is_exponential(self, value: Value, term: Value, maximum: Op) -> bool:
        """Whether a value is exp(f - m)."""
        op = self.made.get(value)
        if op is None or op.opcode not in ("exp", "exp2"):
            return False
        negated: Key = ("neg", self.key(maximum.results[0]))
        return self._sum(op.operands[0]) == sorted_keys([*self._sum(term), negated])

    def _is_shifted(self, exponential: Value, maximum: Op) -> bool:
        """Whether an exponent has that in place of the maximum itself."""
        waiting = [exponential]
        while waiting:
            op = self.made.get(waiting.pop())
            if op is not None and op.opcode == "select" and self._shifted(op) is maximum.results[0]:
                return True
            if op is not None and op.opcode in ("exp", "exp2", "add", "sub", "neg", "fma"):
                waiting += op.operands
        return False

    def depends(self, value: Value) -> frozenset[Value]:
        """The loop indices a value is made of."""
        known = self.used.get(value)
        if known is None:
            if value in self.leaves:
                known = frozenset({value})
            else:
                op = self.made.get(value)
                known = frozenset()
                if op is not None:
                    inside = [v for region in op.regions for inner in walk(region) for v in inner.operands]
                    known = known.union(*(self.depends(v) for v in (*op.operands, *inside)))
                    known -= {a for region in op.regions for a in region.args}
            self.used[value] = known
        return known


def block_of(found: Attention) -> Block:
    """The region whose end the kernel's results are made at."""
    return found.parallel.regions[0] if found.loop is None else found.loop.regions[0]
