"""Recurrent layers: RNN, GRU and LSTM. The steps are an ordered loop of one kernel; what a step computes runs in parallel.

The products with the input of all steps are one product before the loop.
"""

from __future__ import annotations

from collections.abc import Callable

from tilewright.graphs.onnx.loops import X, call, choose
from tilewright.graphs.onnx.operator_rules import NodeKernel, NodeView, operator
from tilewright.graphs.onnx.operators.matrices import product
from tilewright.graphs.onnx.operators.movement import joined
from tilewright.graphs.onnx.values import Known

Activation = Callable[[X], X]
_GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
_DEFAULTS = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}

_FUNCTIONS: dict[str, tuple[Callable[[X, float, float], X], float, float]] = {
    "sigmoid": (lambda x, a, b: call("sigmoid", x), 0.0, 0.0),
    "tanh": (lambda x, a, b: call("tanh", x), 0.0, 0.0),
    "relu": (lambda x, a, b: call("max", x, 0.0), 0.0, 0.0),
    "softplus": (lambda x, a, b: call("softplus", x), 0.0, 0.0),
    "softsign": (lambda x, a, b: x / (1.0 + call("abs", x)), 0.0, 0.0),
    "leakyrelu": (lambda x, a, b: choose(x < 0.0, a * x, x), 0.01, 0.0),
    "elu": (lambda x, a, b: choose(x < 0.0, a * (call("exp", x) - 1.0), x), 1.0, 0.0),
    "thresholdedrelu": (lambda x, a, b: choose(x > a, x, 0.0), 1.0, 0.0),
    "hardsigmoid": (lambda x, a, b: call("clamp", a * x + b, 0.0, 1.0), 0.2, 0.5),
    "affine": (lambda x, a, b: a * x + b, 1.0, 0.0),
    "scaledtanh": (lambda x, a, b: a * call("tanh", b * x), 1.0, 1.0),
}
"""Functions of `x`, alpha and beta, with the defaults of these."""


def _bound(function: Callable[[X, float, float], X], alpha: float, beta: float) -> Activation:
    return lambda x: function(x, alpha, beta)


def _clipped(function: Activation, limit: float) -> Activation:
    return lambda x: function(call("clamp", x, -limit, limit))


def _activations(node: NodeView, directions: int) -> list[list[Activation]]:
    """The functions of each direction."""
    each = len(_DEFAULTS[node.op])
    record = node.record.attributes.get("activations")
    names = [b.decode("utf-8", "replace") for b in record.value] if record is not None and isinstance(record.value, list) else _DEFAULTS[node.op] * directions
    alphas, betas = node.record.attributes.get("activation_alpha"), node.record.attributes.get("activation_beta")
    if len(names) != each * directions:
        raise node.error(f"has the activations {names} for {directions} direction(s)", "TW004")

    def number(record: object, position: int, default: float) -> float:
        values = getattr(record, "value", None)
        return float(values[position]) if isinstance(values, list) and position < len(values) else default

    found: list[Activation] = []
    for position, name in enumerate(names):
        lower = name.lower()
        if lower not in _FUNCTIONS:
            raise node.error(f"its activation '{name}' is unknown")
        function, alpha, beta = _FUNCTIONS[lower]
        found.append(_bound(function, number(alphas, position, alpha), number(betas, position, beta)))
    clip = node.number("clip") if node.has("clip") else 0.0
    if clip:
        found = [_clipped(f, clip) for f in found]
    return [found[d * each : (d + 1) * each] for d in range(directions)]


@operator("RNN", "GRU", "LSTM", note="both directions, lengths, initial states, peepholes, layout")
def recurrent(node: NodeView) -> list[Known | None]:
    node.float_input(0, 1, 2)
    x, w, r = node.input(0), node.input(1), node.input(2)
    gates, hidden = _GATES[node.op], r.shape[-1] if r.rank == 3 else 0
    direction = node.text("direction", "forward")
    if direction not in ("forward", "reverse", "bidirectional"):
        raise node.error(f"direction is '{direction}'", "TW004")
    directions = 2 if direction == "bidirectional" else 1
    batch_first = bool(node.integer("layout"))
    if x.rank == 3 and batch_first:
        x = node.transpose(x, (1, 0, 2))
    if x.rank != 3 or w.shape != (directions, gates * hidden, x.shape[2]) or r.shape != (directions, gates * hidden, hidden) or not hidden:
        raise node.error(f"its operands are {list(x.shape)}, {list(w.shape)} and {list(r.shape)}", "TW004")
    if node.integer("input_forget"):
        raise node.error("couples input and forget gates")
    steps, batch, _ = x.shape
    bias, lengths = node.maybe(3), node.maybe(4)
    states = [node.maybe(5), node.maybe(6) if node.op == "LSTM" else None]
    peephole = node.maybe(7) if node.op == "LSTM" else None
    if batch_first:
        states = [None if s is None else node.transpose(s, (1, 0, 2)) for s in states]
    shapes = ((bias, (directions, 2 * gates * hidden)), (lengths, (batch,)), *((s, (directions, batch, hidden)) for s in states), (peephole, (directions, 3 * hidden)))
    for value, wanted in shapes:
        if value is not None and value.shape != wanted:
            raise node.error(f"an input is {list(value.shape)}, not {list(wanted)}", "TW004")
    activations = _activations(node, directions)
    outputs: list[Known] = []
    last: list[Known] = []
    cells: list[Known] = []
    for d in range(directions):
        backward = direction == "reverse" or d == 1

        def of(value: Known | None, d: int = d) -> Known | None:
            return None if value is None else node.reshape(node.slice(value, 0, d, 1), value.shape[1:])

        own_w, own_r = of(w), of(r)
        assert own_w is not None and own_r is not None
        flat = node.reshape(x, (steps * batch, x.shape[2]))
        projected = node.reshape(product(node, flat, node.transpose(own_w, (1, 0))), (steps, batch, gates * hidden))
        made = _direction(node, projected, own_r, of(bias), lengths, [of(s) for s in states], of(peephole), activations[d], backward)
        outputs.append(node.reshape(made[0], (steps, 1, batch, hidden)))
        last.append(node.reshape(made[1], (1, batch, hidden)))
        if node.op == "LSTM":
            cells.append(node.reshape(made[2], (1, batch, hidden)))
    y = outputs[0] if directions == 1 else joined(node, outputs, 1)
    found = [y, *(part[0] if directions == 1 else joined(node, part, 0) for part in (last, cells) if part)]
    if batch_first:
        found = [node.transpose(found[0], (2, 0, 1, 3)), *(node.transpose(f, (1, 0, 2)) for f in found[1:])]
    return list(found)


def _direction(
    node: NodeView, projected: Known, r: Known, bias: Known | None, lengths: Known | None, states: list[Known | None], peephole: Known | None,
    activations: list[Activation], backward: bool,
) -> list[Known]:  # fmt: skip
    """All steps of one direction: outputs by step, the last state, and the last cell of an LSTM."""
    steps, batch, width = projected.shape
    gates, hidden = _GATES[node.op], r.shape[1]
    dtype = projected.dtype
    kernel = node.kernel(f"onnx_{node.op.lower()}")
    out = kernel.output((steps, batch, hidden), dtype)
    state = kernel.output((batch, hidden), dtype)
    cell = kernel.output((batch, hidden), dtype) if node.op == "LSTM" else ""
    for target, start in zip((state, cell), states, strict=True):
        if target:
            with kernel.grid(batch, hidden) as (b, h):
                kernel.store(target, (b, h), 0.0 if start is None else kernel.read(start, b, h, literal=False))
    sums = kernel.array((gates, batch, hidden), dtype)
    reset = kernel.array((batch, hidden), dtype) if node.op == "GRU" and not node.integer("linear_before_reset") else ""

    def recurrent_sum(gate: object, b: X, h: X, source: str) -> X:
        return kernel.reduce([hidden], 0.0, lambda acc, k: kernel.set(acc, kernel.at(source, b, k[0]) * kernel.read(r, gate * hidden + h if isinstance(gate, X) else h + gate * hidden, k[0], literal=False), "+"))  # type: ignore[operator]

    def biased(value: X, gate: object, h: X, which: int | None = None) -> X:
        if bias is None:
            return value
        place = h + gate * hidden if not isinstance(gate, X) else gate * hidden + h  # type: ignore[operator]
        if which in (None, 0):
            value = value + kernel.read(bias, place)
        return value + kernel.read(bias, place + width) if which in (None, 1) else value

    with kernel.loop(steps) as t:
        if backward and lengths is None:
            at: Callable[[X], X] = lambda b: steps - 1 - t  # noqa: E731
        elif backward:
            assert lengths is not None
            at = lambda b: choose(t < kernel.read(lengths, b, literal=False), kernel.read(lengths, b, literal=False) - 1 - t, t)  # noqa: E731
        else:
            at = lambda b: t  # noqa: E731

        def active(b: X) -> X | None:
            return None if lengths is None else t < kernel.read(lengths, b, literal=False)

        if node.op == "GRU":
            _gru_step(node, kernel, projected, sums, state, reset, activations, hidden, at, recurrent_sum, biased)
        else:
            with kernel.grid(gates, batch, hidden) as (g, b, h):
                total = recurrent_sum(g, b, h, state)
                kernel.store(sums, (g, b, h), biased(total + kernel.read(projected, at(b), b, g * hidden + h, literal=False), g, h))
        with kernel.grid(batch, hidden) as (b, h):
            fresh_cell: X | None = None
            if node.op == "RNN":
                fresh = activations[0](kernel.at(sums, 0, b, h))
            elif node.op == "LSTM":
                before = kernel.let(kernel.at(cell, b, h))

                def gate_sum(number: int, peeped: int, value: X) -> X:
                    total = kernel.at(sums, number, b, h)
                    return total if peephole is None else total + kernel.read(peephole, h + peeped * hidden, literal=False) * value

                enter, forget = activations[0](gate_sum(0, 0, before)), activations[0](gate_sum(2, 2, before))
                fresh_cell = kernel.let(forget * before + enter * activations[1](kernel.at(sums, 3, b, h)))
                fresh = activations[0](gate_sum(1, 1, fresh_cell)) * activations[2](fresh_cell)
            else:
                update = kernel.let(activations[0](kernel.at(sums, 0, b, h)))
                fresh = (1.0 - update) * activations[1](kernel.at(sums, 2, b, h)) + update * kernel.at(state, b, h)
            fresh = kernel.let(fresh)
            alive = active(b)
            if alive is None:
                kernel.store(state, (b, h), fresh)
                kernel.store(out, (at(b), b, h), fresh)
                if fresh_cell is not None:
                    kernel.store(cell, (b, h), fresh_cell)
            else:
                kernel.store(out, (at(b), b, h), choose(alive, fresh, 0.0))
                if fresh_cell is not None:
                    kernel.store(cell, (b, h), choose(alive, fresh_cell, kernel.at(cell, b, h)))
                kernel.store(state, (b, h), choose(alive, fresh, kernel.at(state, b, h)))
    return kernel.finish()


def _gru_step(
    node: NodeView, kernel: NodeKernel, projected: Known, sums: str, state: str, reset: str, activations: list[Activation], hidden: int,
    at: Callable[[X], X], recurrent_sum: Callable[[object, X, X, str], X], biased: Callable[..., X],
) -> None:  # fmt: skip
    """Sums of the gates of a GRU: update, reset, hidden."""
    batch = projected.shape[1]
    with kernel.grid(2, batch, hidden) as (g, b, h):
        total = recurrent_sum(g, b, h, state)
        kernel.store(sums, (g, b, h), biased(total + kernel.read(projected, at(b), b, g * hidden + h, literal=False), g, h))
    if reset:
        with kernel.grid(batch, hidden) as (b, h):
            kernel.store(reset, (b, h), activations[0](kernel.at(sums, 1, b, h)) * kernel.at(state, b, h))
        with kernel.grid(batch, hidden) as (b, h):
            total = recurrent_sum(2, b, h, reset)
            kernel.store(sums, (2, b, h), biased(total + kernel.read(projected, at(b), b, h + 2 * hidden, literal=False), 2, h))
        return
    with kernel.grid(batch, hidden) as (b, h):
        linear = biased(recurrent_sum(2, b, h, state), 2, h, 1)
        gate = activations[0](kernel.at(sums, 1, b, h))
        kernel.store(sums, (2, b, h), biased(kernel.read(projected, at(b), b, h + 2 * hidden, literal=False), 2, h, 0) + gate * linear)

