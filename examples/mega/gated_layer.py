"""A gated layer as an instruction tape: `tilewright inspect --mega examples/mega/gated_layer.py --plot layer.svg`."""

from __future__ import annotations

import numpy as np

import tilewright as tw

WIDTH, HIDDEN = 512, 1024

tape = tw.mega.Tape("gated_layer")
x = tape.input("x", (1, WIDTH))
norm = tape.emit("RMSNorm", x, tape.frozen("gamma", np.ones(WIDTH, np.float32)))
gate = tape.emit("Silu", tape.emit("MatMul", norm, tape.frozen("gate", shape=(HIDDEN, WIDTH)), transB=1))
up = tape.emit("MatMul", norm, tape.frozen("up", shape=(HIDDEN, WIDTH)), transB=1)
down = tape.emit("MatMul", tape.emit("Mul", gate, up), tape.frozen("down", shape=(WIDTH, HIDDEN)), transB=1)
tape.output("y", tape.emit("Add", x, down))


def main() -> None:
    """One launch on the CPU, against float64."""
    rng = np.random.default_rng(0)
    weights = [(rng.standard_normal(shape) / shape[1] ** 0.5).astype(np.float32) for shape in ((HIDDEN, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN))]
    given = rng.standard_normal((1, WIDTH)).astype(np.float32)
    with tw.mega.plan(tape).compile("cpu").load() as runner:
        runner.set_weights(weights)
        found = runner.launch(given)
    row, (g, u, d) = given.astype(np.float64), (w.astype(np.float64) for w in weights)
    row /= np.sqrt((row * row).mean() + 1e-6)
    gated = row @ g.T
    want = given + (gated / (1 + np.exp(-gated)) * (row @ u.T)) @ d.T
    print("largest difference from float64:", f"{np.abs(found - want).max():.1e}")


if __name__ == "__main__":
    main()
