"""What makes kernels slow is said: which kernels, why, at which line, and what to write instead."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tilewright.base.errors import Note
from tilewright.base.target import parse_target
from tilewright.cli.guess import parse_arguments
from tilewright.cli.sources import parse_source, read_source, walk
from tilewright.compile.driver import compile_kernel, forget, performance_notes
from tilewright.compile.serial import deserialise, serialise

ROOT = Path(__file__).parents[3]


def notes(text: str, target: str = "cpu", args: str = "", path: str = "kernel.py") -> list[Note]:
    chosen = parse_target(target)
    entries = walk(parse_source(text, path), parse_arguments(args)).raise_if_errors().entries
    return [note for e in entries for note in performance_notes(e.function, e.signature(chosen.is_gpu), chosen)]


def python(body: str, params: str) -> str:
    lines = "\n".join(f"    {line}" for line in body.strip("\n").splitlines())
    return f"import tilewright as tw\n\n\n@tw.kernel\ndef f({params}) -> tw.Array:\n{lines}\n"


X, XY = "x: tw.Array", "x: tw.Array, y: tw.Array"
ONE_THREAD: Mapping[str, tuple[str, str, int, str]] = {
    "time loop": ("""
n, m = x.shape
u = tw.empty((n, m), x.dtype)
for i, j in tw.grid(n, m):
    u[i, j] = x[i, j]
for t in range(steps):
    for i, j in tw.grid(n, m):
        if x[i, j] > 0:
            u[i, j] = 0.5 * u[n - 1 - i, m - 1 - j]
return u""", X + ", steps: int", 10, "which the turn before it wrote"),
    "length from memory": ("""
total = 0.0
for i in range(y[0]):
    total += x[i]
return total""", XY, 7, "an element of 'y'"),
    "scatter": ("""
out = tw.zeros((16,), x.dtype)
for i in tw.grid(x.shape[0]):
    out[y[i]] = 0.5 * out[y[i]] + x[i]
return out""", XY, 7, "data decides where the loop over 'i' writes in 'out'"),
    "while": ("""
i = 0
total = 0.0
while i < x.shape[0]:
    total += x[i]
    i += 1
return total""", X, 8, "while loop"),
    "carried": ("""
best = 0.0
place = 0.0
for i in range(x.shape[0]):
    if x[i] > best:
        best = x[i]
        place = place + best
return place""", X, 8, "carried from one turn"),
    "a sum of another length that needs the first": ("""
out = tw.empty((2,), x.dtype)
for _ in tw.grid(1):
    first = 0.0
    for i in range(x.shape[0]):
        first += x[i]
    second = 0.0
    for i in range(y.shape[0]):
        second += tw.cast(y[i], tw.f32) * first
    out[0] = first
    out[1] = second
return out""", XY, 9, "other work stands beside the sum"),
}  # fmt: skip


@pytest.mark.parametrize("name", ONE_THREAD)
def test_kernels_on_one_thread_are_named(name: str) -> None:
    body, params, line, reason = ONE_THREAD[name]
    args = "y=i64[*]" if "y:" in params else ""
    for target, where in (("cpu", "on one thread"), ("sm_90a", "in one block")):
        (note,) = notes(python(body, params), target, args)
        assert (note.code, note.line) == ("TW060", line)
        assert reason in note.message
        assert where in note.message
        assert note.help


@pytest.mark.parametrize("target", ["cpu", "sm_90a"])
def test_sums_of_one_length_are_cut_together(target: str) -> None:
    body = """
first = 0.0
second = 0.0
out = tw.empty((2,), x.dtype)
for i in range(x.shape[0]):
    first += x[i]
    second += x[i] * x[i]
out[0] = first
out[1] = second
return out"""
    assert not notes(python(body, X), target, "")


@pytest.mark.parametrize("target", ["cpu", "sm_90a"])
@pytest.mark.parametrize("body", [
    "out = tw.zeros((16,), x.dtype)\nfor i in tw.grid(x.shape[0]):\n    out[y[i]] += x[i]\nreturn out",
    "out = tw.zeros((16,), x.dtype)\nfor i in range(x.shape[0]):\n    out[y[i]] = tw.max(out[y[i]], x[i])\nreturn out",
])  # fmt: skip
def test_scatters_are_parallel(body: str, target: str) -> None:
    assert not notes(python("\n" + body, XY), target, "y=i64[*]")


@pytest.mark.parametrize("target", ["cpu", "sm_90a"])
def test_a_product_whose_sum_is_the_outermost_loop_is_one(target: str) -> None:
    body = NEST + """
for k in range(depth):
    for i, j in tw.grid(m, n):
        out[i, j] += x[i, k] * y[k, j]
return out"""
    assert not notes(python(body, XY), target)


SCANS: Mapping[str, tuple[str, str]] = {
    "sum, which is wanted at the end": ("""
(n,) = x.shape
out = tw.empty((n + 1,), x.dtype)
total = 0.0
for i in range(n):
    total = total + x[i]
    out[i] = total
out[n] = total
return out""", "tw.scan(x)"),
    "exclusive product": ("""
(n,) = x.shape
out = tw.empty((n + 1,), x.dtype)
total = 1.0
for i in range(n):
    out[i] = total
    total *= x[i]
out[n] = total
return out""", 'tw.scan(x, "prod", exclusive=True)'),
    "maximum through the array": ("""
(n,) = x.shape
out = tw.empty((n,), x.dtype)
out[0] = x[0]
for i in range(1, n):
    out[i] = tw.max(out[i - 1], x[i])
return out""", 'tw.scan(x, "max")'),
    "rows": ("""
n, m = x.shape
out = tw.empty((n, m + 1), x.dtype)
for r in tw.grid(n):
    total = 0.0
    for i in range(m):
        total += x[r, i]
        out[r, i] = total
    out[r, m] = total
return out""", "for each"),
}  # fmt: skip


@pytest.mark.parametrize("name", SCANS)
def test_scans_that_run_in_order_are_named_with_the_primitive(name: str) -> None:
    body, said = SCANS[name]
    (note,) = notes(python(body, X))
    assert note.code == "TW062"
    assert said in note.message + note.help


NEST = """
m, depth = x.shape
n = y.shape[1]
out = tw.zeros((m, n), x.dtype)
"""
PRODUCTS: Mapping[str, tuple[str, str]] = {
    "three factors": (NEST + """
for i, j in tw.grid(m, n):
    total = 0.0
    for k in range(depth):
        total += x[i, k] * y[k, j] * x[0, k]
    out[i, j] = total
return out""", "multiplied last"),
    "ragged": (NEST + """
for i, j in tw.grid(m, n):
    total = 0.0
    for k in range(i // 2):
        total += x[i, k] * y[k, j]
    out[i, j] = total
return out""", "depends on another loop's index"),
    "not only added": (NEST + """
for i, j in tw.grid(m, n):
    total = 0.0
    for k in range(depth):
        total = tw.max(total, 0.0) + x[i, k] * y[k, j]
    out[i, j] = total
return out""", "in order"),
    "terms left out": (NEST + """
for i, j in tw.grid(m, n):
    total = 0.0
    for k in range(depth):
        if x[i, k] > 0.0:
            total += x[i, k] * y[k, j]
    out[i, j] = total
return out""", "leaves out terms"),
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_that_are_not_recognised_say_why(name: str) -> None:
    body, reason = PRODUCTS[name]
    for target in ("cpu", "sm_90a"):
        (note,) = notes(python(body, XY), target)
        assert note.code == "TW061"
        assert "looks like a product" in note.message
        assert reason in note.message
        assert note.help


def test_convolutions_and_attention_are_called_so() -> None:
    body = """
h, w, c = x.shape
o, r = y.shape[0], y.shape[1]
out = tw.empty((h, w, o), x.dtype)
for i, j, f in tw.grid(h, w, o):
    total = 0.0
    for k, p, q in tw.grid(c, r, r):
        if i + p < h or j + q < w:
            total += x[(i + p) % h, (j + q) % w, k] * y[f, p, q, k]
    out[i, j, f] = total
return out"""
    (note,) = notes(python(body, XY))
    assert "looks like a convolution" in note.message
    body = """
n, d = x.shape
m = y.shape[0]
out = tw.empty((n, d), x.dtype)
for i, e in tw.grid(n, d):
    total = 0.0
    weighted = 0.0
    for j in range(m):
        score = 0.0
        for k in range(d):
            score += x[i, k] * y[j, k]
        weight = tw.exp(score)
        total += weight
        weighted += weight * z[j, e]
    out[i, e] = weighted / total
return out"""
    (note,) = notes(python(body, XY + ", z: tw.Array"))
    assert "looks like attention" in note.message
    assert "maximum" in note.message


SILENT = {
    "a product whose results are stored under a condition": (NEST + """
for i, j in tw.grid(m, n):
    total = 0.0
    for k in range(depth):
        total += (x[i, k] + 1.0) * y[k, j]
    if total > 0.0:
        out[i, j] = total
return out""", XY),
    "a number as the length of a sum": ("""
total = 0.0
for i in range(n):
    total += tw.sin(1.0 * i) * x[0]
return total""", X + ", n: int"),
    "short": ("""
out = tw.empty((8,), x.dtype)
total = 0.0
for i in range(8):
    total += x[i]
    out[i] = total
return out""", X),
    "scalar": ("""
y = x[0]
for t in range(steps):
    y = y + 0.1 * tw.sin(y)
return y""", X + ", steps: int"),
    "sum": ("""
total = 0.0
for i in range(x.shape[0]):
    total += x[i]
return total""", X),
    "thin product": ("""
m, n = x.shape[0], y.shape[1]
out = tw.empty((m, n), x.dtype)
for i, j in tw.grid(m, n):
    total = 0.0
    for k in range(3):
        if k <= i:
            total += x[i, k] * y[k, j]
    out[i, j] = total
return out""", XY),
    "while for each element": ("""
(n,) = x.shape
out = tw.empty((n,), x.dtype)
for i in tw.grid(n):
    v = x[i]
    while v > 1.0:
        v = v * 0.5
    out[i] = v
return out""", X),
}  # fmt: skip


@pytest.mark.parametrize("name", SILENT)
def test_what_is_fast_or_small_is_silent(name: str) -> None:
    body, params = SILENT[name]
    assert notes(python(body, params)) == []
    assert notes(python(body, params), "sm_90a") == []


def test_zynml_says_the_same() -> None:
    text = "let y = compute(x) {\n    @kernel custom\n    var total = 0.0\n    for i in 0..n {\n        total = total + x[i]\n        out[i] = total\n    }\n    out[n] = total\n}\n"
    (note,) = notes(text, args="x=f32[*]", path="program.zyn")
    assert (note.code, note.line) == ("TW062", 4)


CHECKED = {"grouped_attention": "is checked as the kernel runs"}
"""Examples that may say something, and what: which heads share keys is known only at the call."""


def test_the_examples_are_silent() -> None:
    host = parse_target("cpu")
    for path in sorted([*(ROOT / "examples").glob("*.py"), *(ROOT / "examples/zyn").glob("*.zyn")]):
        for entry in walk(read_source(str(path)), {}).raise_if_errors().entries:
            for note in performance_notes(entry.function, entry.signature(gpu=False), host):
                assert CHECKED.get(entry.name, "?") in note.message, f"{path}: {entry.name}"


def test_notes_are_kept_with_the_code() -> None:
    body, params, *_ = ONE_THREAD["carried"]
    (entry,) = walk(parse_source(python(body, params), "kernel.py"), parse_arguments("")).entries
    artifact = compile_kernel(entry.function, entry.signature(gpu=False), parse_target("cpu"))
    assert [note.code for note in artifact.notes] == ["TW060"]
    assert deserialise(serialise(artifact)) == artifact
    forget()
    again = compile_kernel(entry.function, entry.signature(gpu=False), parse_target("cpu"))
    assert again.notes == artifact.notes
    assert "8 | " in again.notes[0].render()
