"""`python tools/fuzz_onnx.py [--seconds N] [--state FILE]`: mutate small ONNX models and see that nothing worse than an error happens.

In: models of one to three nodes (`seeds`), and a random stream. Each step changes some bytes, or some values of a model before it is written, opens the
result and runs it where it opens. A `TilewrightError` is right, and so is a result; anything else is a failure, which is printed with the bytes. With
`--state` a later run goes on where this one ended.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.onnx_writer import graph, model, node, single, value, varint

import tilewright as tw
from tilewright.graphs.onnx.wire import FIXED64, VARINT, Malformed, fields

MOST_BYTES = 1 << 22
"""The largest tensor a mutated model may make."""


def seeds() -> list[bytes]:
    """Small models of many operators."""
    x, image = np.ones((2, 3), np.float32), np.ones((1, 2, 5, 4), np.float32)
    found = [
        single("Add", (x, x))[0],
        single("Gemm", (x, x, x[0, :2]), transB=1)[0],
        single("Conv", (image, np.ones((4, 1, 3, 3), np.float32)), constants=(1,), group=2, pads=[1, 1, 1, 1], strides=[2, 1])[0],
        single("Slice", (x, np.array([0]), np.array([2]), np.array([1])), constants=(1, 2, 3))[0],
        single("Pad", (x, np.array([0, 1, 2, 0])), constants=(1,), mode="reflect")[0],
        single("Resize", (image, None, np.array([1, 1, 2, 2], np.float32)), constants=(2,), mode="linear")[0],
        single("ReduceSum", (x, np.array([1])), constants=(1,))[0],
        single("Reshape", (x, np.array([3, -1])), constants=(1,))[0],
        single("TopK", (x, np.array([2])), constants=(1,), outputs=2)[0],
        single("MaxPool", (image,), kernel_shape=[2, 2], ceil_mode=1)[0],
        single("Einsum", (x, x), equation="ij,kj->ik")[0],
        single("Tile", (x, np.array([2, 2])), constants=(1,))[0],
        single("LSTM", (np.ones((2, 1, 3), np.float32), np.ones((1, 8, 3), np.float32), np.ones((1, 8, 2), np.float32)), outputs=3, hidden_size=2)[0],
        single("QuantizeLinear", (x, np.float32(0.5), np.uint8(3)), constants=(1, 2))[0],
        single("MatMulNBits", (np.ones((1, 32), np.float32), np.ones((2, 1, 16), np.uint8), np.ones(2, np.float32)), constants=(1, 2), domain="com.microsoft", N=2, K=32, bits=4, block_size=32)[0],
    ]
    nodes = [node("Shape", ["x"], ["s"]), node("ConstantOfShape", ["s"], ["c"], value=np.ones(1, np.float32)), node("Concat", ["c", "x"], ["y"], axis=1)]
    found.append(model(nodes, [value("x", np.float32, ["n", "m"])], ["y"]))
    branch = graph([node("Neg", ["x"], ["b"])], [], ["b"])
    nodes = [node("Equal", ["k", "one"], ["c"]), node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)]
    found.append(model(nodes, [value("x", np.float32, ["n"]), value("k", np.int64, [])], ["y"], {"one": np.array(1)}))
    return found


def mutated(data: bytes, generator: np.random.Generator) -> bytes:
    """Some bytes changed, removed, repeated or replaced by numbers at the edges."""
    found = bytearray(data)
    for _ in range(int(generator.integers(1, 5))):
        at = int(generator.integers(0, max(1, len(found))))
        kind = int(generator.integers(0, 7))
        if kind <= 1 and found:
            found[at] = int(generator.integers(0, 256))
        elif kind == 2 and found:
            found[at] = (found[at] + int(generator.choice([1, -1, 0x7F, 0x80]))) % 256
        elif kind == 3:
            del found[at : at + int(generator.integers(1, 9))]
        elif kind == 4:
            found[at:at] = found[at : at + int(generator.integers(1, 33))]
        elif kind == 5:
            found[at : at + 1] = varint(int(generator.choice([0, 1 << 31, 1 << 62, (1 << 64) - 1, 1 << 40])))
        else:
            found = found[:at]
    return bytes(found)


EDGES = (0, 1, 2, 3, 7, 31, 1 << 31, 1 << 40, 1 << 62, (1 << 64) - 1, (1 << 64) - 2)


def tweaked(data: bytes, generator: np.random.Generator) -> bytes:
    """One field changed somewhere inside, with all lengths right again."""
    try:
        parts = [(number, kind, bytes(v) if isinstance(v, memoryview) else v) for number, kind, v in fields(memoryview(data))]
    except Malformed:
        return mutated(data, generator)
    if not parts:
        return mutated(data, generator)
    at = int(generator.integers(0, len(parts)))
    number, kind, what = parts[at]
    chance = float(generator.random())
    if isinstance(what, bytes) and chance < 0.8 and len(what) > 2:
        parts[at] = number, kind, tweaked(what, generator)
    elif isinstance(what, bytes) and chance < 0.9:
        parts[at] = number, kind, mutated(what, generator)
    elif chance < 0.9:
        parts[at] = number, kind, int(generator.choice(np.array(EDGES, np.uint64))) if kind == VARINT else int(generator.integers(0, 1 << 32))
    elif chance < 0.95:
        del parts[at]
    else:
        parts.insert(int(generator.integers(0, len(parts))), parts[at])
    found = b""
    for number, kind, what in parts:
        found += varint(number << 3 | kind)
        found += varint(len(what)) + what if isinstance(what, bytes) else varint(what) if kind == VARINT else what.to_bytes(8 if kind == FIXED64 else 4, "little")
    return found


def attempt(data: bytes) -> str:
    """Open and run a model: what came of it, or a failure."""
    try:
        found = tw.graph.from_onnx(data, max_bytes=MOST_BYTES)
        inputs: dict[str, Any] = {}
        total = 0
        for name, wanted in found.inputs.items():
            shape = tuple(d if isinstance(d, int) else 2 for d in wanted.dims or ())
            total += int(np.prod([float(n) for n in shape])) * wanted.dtype.itemsize
            if total > MOST_BYTES:
                return "large inputs"
            inputs[name] = np.ones(shape, wanted.dtype)
        found.run(inputs, device="cpu")
        return "ran"
    except tw.CompilerBug as error:
        return f"FAILED compiler bug: {error}"
    except tw.TilewrightError as error:
        return f"refused {error.code}"
    except MemoryError:
        return "FAILED out of memory"
    except Exception:
        return "FAILED " + traceback.format_exc()


def fuzz(seconds: float, steps: int, start: int = 0, verbose: bool = True) -> tuple[dict[str, int], list[str], int]:
    """Counts of what happened, failures, and the next step."""
    warnings.simplefilter("ignore")
    models = seeds()
    counts: dict[str, int] = {}
    failures: list[str] = []
    end, step = time.monotonic() + seconds, start
    while time.monotonic() < end and step < start + steps:
        generator = np.random.default_rng([step, 11])
        data = models[int(generator.integers(0, len(models)))]
        for _ in range(int(generator.integers(1, 4))):
            data = tweaked(data, generator)
        tracemalloc.start() if step % 64 == 0 else None
        outcome = attempt(data)
        if tracemalloc.is_tracing():
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            if peak > 64 * MOST_BYTES:
                outcome = f"FAILED used {peak:,} bytes"
        key = "FAILED" if outcome.startswith("FAILED") else outcome
        counts[key] = counts.get(key, 0) + 1
        if key == "FAILED":
            failures.append(f"step {step}: {outcome}\n{data.hex()}")
            if verbose:
                print(failures[-1], flush=True)
        step += 1
    return counts, failures, step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--steps", type=int, default=1 << 40)
    parser.add_argument("--state", type=Path, help="a file that keeps the next step")
    options = parser.parse_args()
    start = json.loads(options.state.read_text())["step"] if options.state and options.state.exists() else 0
    counts, failures, step = fuzz(options.seconds, options.steps, start)
    if options.state:
        options.state.write_text(json.dumps({"step": step}))
    print(f"steps {start} to {step}: " + ", ".join(f"{key} {count}" for key, count in sorted(counts.items())))
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
