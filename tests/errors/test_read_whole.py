"""Every kind of statement and expression is read whole, or refused at its line with advice: one table for each front end.

An accepted kernel gives what plain Python gives for the same text.
"""

from __future__ import annotations

import functools
import itertools
import linecache
import types
from pathlib import Path
from textwrap import dedent, indent

import numpy as np
import pytest

import tilewright as tw

X = np.arange(1, 7, dtype=np.float32)
PLAIN = types.SimpleNamespace(
    grid=lambda extent: range(extent), zeros=lambda shape, dtype: np.zeros(shape, dtype), sqrt=np.sqrt, f32=np.float32, i32=np.int32,
    kernel=lambda function: function,
)  # fmt: skip
_numbers = itertools.count()


def defined(text: str, package: object, name: str = "k") -> types.FunctionType:
    """The function of a text, whose source can be found again."""
    path = f"<whole {next(_numbers)}>"
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    names: dict[str, object] = {"tw": package, "functools": functools}
    exec(compile(text, path, "exec"), names)
    return names[name]  # type: ignore[return-value]


def kernel_text(body: str) -> str:
    head = "@tw.kernel\ndef k(x):\n    n, = x.shape\n    out = tw.zeros((n,), tw.f32)\n"
    return head + indent(dedent(body), "    ") + "\n    return out\n"


ELEMENTS = "for i in tw.grid(n):\n    out[i] = "
ACCEPTED = {
    "a chain of targets": "y = tw.zeros((n,), tw.f32)\nfor i in range(n):\n    y[i] = t = y[i] + x[i]\n    out[i] = t",
    "a chain that reads its target": "a = 1.0\nfor i in range(n):\n    a = b = a * 2.0\n    out[i] = b",
    "a chain of elements": "y = tw.zeros((n,), tw.f32)\nfor i in tw.grid(n):\n    out[i] = y[i] = x[i] * 2.0",
    "an index hides a variable": "i = 5\nfor i in range(3):\n    out[i] = x[i]\ni = 4\nout[5] = i",
    "a bound that changes": "m = 3\nfor i in range(m):\n    m = m + 1\n    out[i] = x[i] + m",
    "a text": "'text'\n" + ELEMENTS + "x[i]",
    "pass": "pass\nfor i in tw.grid(n):\n    pass\n    out[i] = x[i]",
    "comparisons in a row": ELEMENTS + "1.0 if 2.0 < x[i] <= 4.0 != 3.0 else 0.0",
    "a step downwards": "t = 0.0\nfor i in range(n - 1, 0, -2):\n    t = t * 2.0 + x[i]\n    out[i] = t",
    "nested targets": "(a, b), c = (1.0, 2.0), 3.0\n" + ELEMENTS + "x[i] * a + b * c",
    "nested targets and a shape": "(m,), c = x.shape, x.shape[0]\n" + ELEMENTS + "x[i] * c + m",
    "a swap": "for i in range(1):\n    out[0], out[1] = x[1], x[0]",
    "truth of numbers": "for i in tw.grid(n):\n    if x[i] and n:\n        out[i] = 1.0 if x[i] and not (n and i) else 2.0",
    "or of truths": "found = False\nfor i in range(n):\n    found = found or x[i] > 3.0\n    out[i] = found",
    "and that ends in a truth": ELEMENTS + "i and x[i] > 2.0",
    "signs": ELEMENTS + "+x[i] - (-x[i])",
    "shifts and bits": ELEMENTS + "(i << 2) | (i >> 1) ^ 1 & 3",
    "// and % of negatives": ELEMENTS + "(i - 3) % 4 + (i - 3) // 2",
    "updates": "for i in tw.grid(n):\n    out[i] = x[i]\n    out[i] //= 2.0\n    out[i] **= 2",
}
REFUSED = {
    "one array twice": ("a = b = tw.zeros((n,), tw.f32)", "TW005", "one array under several names"),
    "tuples with several targets": ("a, b = c, d = n, n", "TW005", "one assignment for each target"),
    "nested targets with old names": ("a = 1.0\n(a, b), c = (2.0, a), 3.0", "TW005", "one assignment for each part"),
    "an index read as a variable": ("i = 5\nfor i in range(3):\n    out[i] = x[i]\nout[5] = i", "TW010", "the loop of line 6"),
    "an index that changes a variable": ("t = 5\nfor i in range(3):\n    for t in range(2):\n        out[t] = x[t]", "TW010", "choose another name"),
    "and of numbers": (ELEMENTS + "x[i] and 3.0", "TW009", "b if a != 0 else a"),
    "or of numbers": (ELEMENTS + "(x[i] - 1.0) or 7.0", "TW009", "a if a != 0 else b"),
    "or of numbers in turn": ("t = 0.0\nfor i in range(n):\n    t = t or x[i]\n    out[i] = t", "TW009", "a if a != 0 else b"),
    "a variable called": ("abs = 3.0\n" + ELEMENTS + "abs(x[i])", "TW005", "a call of the variable 'abs'"),
    "a shape as a number": ("t = x.shape + 1", "TW005", "x.shape[0]"),
    "a dtype as a number": ("t = x.dtype", "TW005", "where a dtype is given"),
    "a sum": ("x + 1", "TW005", "no effect"),
    "a call": ("for i in tw.grid(n):\n    tw.sqrt(x[i])", "TW005", "no effect"),
    "a comparison": ("for i in tw.grid(n):\n    out[i] == x[i]", "TW005", "no effect"),
    "a number": ("1", "TW005", "no effect"),
    "an ellipsis": ("...", "TW005", "'...'"),
    "print to a file": ("for i in tw.grid(n):\n    print(x[i], file=None)", "TW005", "'file' of print"),
    "a method": ("out.fill(3.0)", "TW005", "'out.fill'"),
    "for else": ("for i in range(n):\n    out[i] = x[i]\nelse:\n    out[0] = 9.0", "TW005", "'else' after 'for'"),
    "while else": ("i = 0\nwhile i < n:\n    i += 1\nelse:\n    out[0] = 9.0", "TW005", "'else' after 'while'"),
    "a slice with a step backwards": ("out = x[4:0:-1]", "TW005", "a negative step"),
    "is": (ELEMENTS + "1.0 if i is i else 0.0", "TW005", "=="),
    "in": (ELEMENTS + "1.0 if i in (1, 2) else 0.0", "TW005", "=="),
    ":=": (ELEMENTS + "(t := x[i]) * t", "TW005", "a line of its own"),
    "lambda": ("f = lambda a, b=2.0: a * b", "TW005", "lambda"),
    "a star": ("a, *b = n, 1, 2", "TW005", "starred"),
    "a star in a call": (ELEMENTS + "max(*(x[i], 3.0))", "TW005", "'*'"),
    "two stars in a call": (ELEMENTS + "tw.sqrt(**{'x': 1.0})", "TW005", "'**'"),
    "del": ("t = 1.0\ndel t", "TW005", "del"),
    "assert": ("assert n > 3, f'bad {n}'", "TW005", "a message that is computed"),
    "global": ("global g\ng = 2.0", "TW005", "global"),
    "with": ("with open('f') as f:\n    pass", "TW005", "with"),
    "try": ("try:\n    out[0] = 1.0\nexcept ValueError:\n    pass", "TW005", "try"),
    "raise": ("raise ValueError('no')", "TW005", "raise"),
    "import": ("import os", "TW005", "import"),
    "def": ("def g(a):\n    return a", "TW005", "nested function"),
    "class": ("class A:\n    pass", "TW005", "class"),
    "match": ("match n:\n    case 1:\n        pass", "TW005", "if and elif"),
    "break": ("for i in range(n):\n    break\n    out[i] = x[i]", "TW005", "never reached"),
    "continue": ("for i in range(n):\n    continue\n    out[i] = x[i]", "TW005", "never reached"),
    "return in a loop": ("for i in tw.grid(n):\n    if i == 3:\n        return out", "TW012", "'return' in the grid"),
    "a keyword of range": ("for i in range(stop=n):\n    out[i] = x[i]", "TW005", "a keyword in range()"),
    "a keyword of grid": ("for i in tw.grid(n, tile=3):\n    out[i] = x[i]", "TW005", "a keyword in grid()"),
    "a step of 0": ("for i in range(0, n, 0):\n    out[i] = x[i]", "TW016", "step"),
    "enumerate": ("for i, v in enumerate(x):\n    out[i] = v", "TW005", "and index"),
    "an f-string": ("s = f'{n!r:>5}'", "TW005", "f-string"),
    "a dict": ("d = {'a': 1}", "TW005", "dict"),
    "a comprehension": ("d = [v for v in range(3)]", "TW005", "comprehension"),
    "yield": ("yield x", "TW005", "yield"),
    "a type without a value": ("t: int", "TW005", "without a value"),
    "a type on an element": ("for i in tw.grid(n):\n    out[i]: tw.f32 = x[i]", "TW005", "remove the type"),
    "a second type": ("t: float = 2.5\nt: float = 3.5", "TW005", "first assignment"),
    "an unknown keyword": (ELEMENTS + "tw.sqrt(x[i], fast=3)", "TW016", "sqrt()"),
    "an unknown keyword of a reduction": ("out = x - tw.sum(x, initial=3.0)", "TW016", "initial"),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_kernels_mean_what_python_means(name: str) -> None:
    text = kernel_text(ACCEPTED[name])
    np.testing.assert_allclose(np.asarray(defined(text, tw)(X)), defined(text, PLAIN)(X), rtol=1e-6)


@pytest.mark.parametrize("name", REFUSED)
def test_kernels_refuse_what_they_would_drop(name: str) -> None:
    body, code, words = REFUSED[name]
    with pytest.raises(tw.TilewrightError) as error:
        defined(kernel_text(body), tw)(X)
    assert f"error[{code}]" in str(error.value)
    assert words in str(error.value)


def test_defaults_act_and_wrappers_are_refused() -> None:
    for head in ("x, s=2.0", "x, *, s=2.0", "x, /, s=2.0", "x, s=1.0 + 1"):
        kernel = defined(f"@tw.kernel\ndef k({head}):\n    return x * s\n", tw)
        np.testing.assert_array_equal(np.asarray(kernel(X)), X * 2)
        np.testing.assert_array_equal(np.asarray(kernel(X, s=3.0)), X * 3)
    text = "def twice(f):\n    @functools.wraps(f)\n    def g(x):\n        return f(x) * 2\n    return g\n\n{}\n@twice\ndef k(x):\n    return x + 1.0\n"
    for decorator in ("@tw.kernel", "@tw.gpu"):
        with pytest.raises(tw.TilewrightError, match="wrapped in another function by a decorator"):
            _called(text.format(decorator))


def _called(text: str) -> object:
    kernel = defined(text, tw)
    return kernel(X) if "@tw.kernel" in text else kernel[1, 6](X)  # type: ignore[index]


# -- explicit kernels ---------------------------------------------------------------------------------------------------

EXPLICIT = {
    "a chain": ("out[i] = t = out[i] + x[i]\nout[i] += t", 2 * X),
    "an index after its loop": ("j = 5\nfor j in range(3):\n    out[i] = j\nout[i] = j", np.full(6, 2)),
    "an index after no iteration": ("j = 5\nfor j in range(0):\n    out[i] = j\nout[i] = j", np.full(6, 5)),
    ":=": ("out[i] = (t := x[i]) * t", X * X),
    "lambda with a default": ("f = lambda a, b=2.0: a * b\nout[i] = f(x[i])", 2 * X),
    "def with a default": ("def f(a, b=2.0):\n    return a * b\nout[i] = f(x[i])", 2 * X),
    "a type in words": ("t: 'tw.f32' = 3\nout[i] = t / 2", np.full(6, 1.5)),
    "float of a whole number": ("t: float = 3\nout[i] = t / 2", np.full(6, 1.5)),
    "nested targets": ("(a, b), c = (1.0, 2.0), 3.0\nout[i] = a + b * c", np.full(6, 7)),
    "truth of numbers": ("out[i] = 1.0 if x[i] and not (n and i) else 2.0", np.array([1, 2, 2, 2, 2, 2])),
    "a step downwards": ("for a in range(5, 0, -2):\n    out[i] = out[i] * 10.0 + a", np.full(6, 531)),
    "a sum": ("x[i] + 1", "TW005", "no effect"),
    "a word that is not called": ("tw.barrier", "TW005", "add ()"),
    "a call": ("tw.sqrt(x[i])", "TW005", "no effect"),
    "a comparison": ("out[i] == 1.0", "TW005", "no effect"),
    "a type without a value": ("t: tw.f32\nout[i] = 1.0", "TW005", "without a value"),
    "a type that is none": ("t: str = 1.5", "TW009", "annotated"),
    "a type of another kind": ("t: int = 1.5", "TW009", "annotated"),
    "a type in words of another kind": ("t: 'tw.i32' = 1.5", "TW006", "i32"),
    "a result of another type": ("def f(a) -> tw.i32:\n    return a\nout[i] = f(x[i])", "TW006", "the result of 'f'"),
    "and of numbers": ("out[i] = x[i] and 3.0", "TW009", "b if a != 0 else a"),
    "or of numbers": ("out[i] = x[i] or 3.0", "TW009", "a if a != 0 else b"),
    "an option of a nested function": ("@tw.device(fast=3)\ndef f(a):\n    return a\nout[i] = f(x[i])", "TW005", "option"),
    "for else": ("for j in range(3):\n    pass\nelse:\n    out[i] = 9.0", "TW005", "'else' of a loop"),
    "nonlocal": ("t = 1.0\ndef f():\n    nonlocal t\n    t = 2.0\nf()", "TW005", "nonlocal"),
    "match": ("match i:\n    case 1:\n        pass", "TW005", "match"),
    "in": ("out[i] = 1.0 if i in (1, 2) else 0.0", "TW005", "'in'"),
    "a conversion in an f-string": ("print(f'{x[i]!r}')", "TW005", "'!'"),
    "an unknown keyword": ("out[i] = tw.sqrt(x[i], fast=3)", "TW016", "fast"),
}


@pytest.mark.parametrize("name", EXPLICIT)
def test_explicit_kernels_read_everything(name: str) -> None:
    body, *expected = EXPLICIT[name]
    head = "@tw.gpu\ndef k(x: tw.GpuBuffer[tw.f32], out: tw.GpuBuffer[tw.f32], n: tw.i32):\n    i = tw.gpu_thread_id()\n"
    kernel, out = defined(head + indent(str(body), "    ") + "\n", tw), np.zeros(6, np.float32)
    if isinstance(expected[0], str):
        with pytest.raises(tw.TilewrightError) as error:
            kernel[1, 6](X, out, 6, device="emulator")  # type: ignore[index]
        assert f"error[{expected[0]}]" in str(error.value)
        assert expected[1] in str(error.value)
        return
    kernel[1, 6](X, out, 6, device="emulator")  # type: ignore[index]
    np.testing.assert_array_equal(out, expected[0])


# -- ZynML --------------------------------------------------------------------------------------------------------------

ZYN = {
    "a sum": ("for i in 0..n:\n    x[i] + 1\n    out[i] = x[i]", "TW005", "no effect"),
    "a call": ("for i in 0..n:\n    sqrt(x[i])\n    out[i] = x[i]", "TW005", "no effect"),
    "return": ("for i in 0..n:\n    out[i] = x[i]\nreturn out", "TW005", "returns once"),
    "yield": ("for i in 0..n:\n    yield x[i]\n    out[i] = x[i]", "TW012", "yield"),
    "an unknown type": ("for i in 0..n:\n    let t: banana = x[i]\n    out[i] = t", "TW002", "banana"),
    "a list": ("for i in [0, 1]:\n    out[i] = x[i]", "TW005", "ranges only"),
    "a step of 0": ("for i in 0..6 step 0:\n    out[i] = x[i]", "TW016", "step"),
    "config": ("config { a: 1 }\nfor i in 0..n:\n    out[i] = x[i]", "TW005", "config"),
    "import": ("import \"a.zyn\"\nfor i in 0..n:\n    out[i] = x[i]", "TW005", "import"),
    "await": ("for i in 0..n:\n    out[i] = await x[i]", "TW005", "await"),
    "a record": ("let r = {a: 1}\nfor i in 0..n:\n    out[i] = x[i] * r.a", "TW005", "record"),
    "an unknown keyword": ("for i in 0..n:\n    out[i] = sqrt(x[i], fast=3)", "TW016", "sqrt()"),
    "an attribute of a statement": ("for i in 0..n:\n    @unroll\n    out[i] = x[i]", "TW001", "@unroll"),
}
ZYN_PROGRAMS = {
    "import in a function": ("pipeline go(x) {\n    import \"a.zyn\"\n    return x\n}\n", "TW005", "an import inside a function"),
    "import in a block": ("if true {\n    import \"a.zyn\"\n}\n", "TW005", "an import inside a block"),
    "a function twice": ("fn go(x) {\n    return x\n}\nfn go(x) {\n    return x * 2.0\n}\n", "TW010", "defined in line 1 already"),
    "a function in a function": ("pipeline go(x) {\n    fn g(a) { return a }\n    return x\n}\n", "TW005", "inside another"),
    "yield outside": ("pipeline go(x) {\n    yield x\n    return x\n}\n", "TW005", "yield outside a kernel"),
    "shared outside": ("pipeline go(x) {\n    shared var t[3]\n    return x\n}\n", "TW005", "a shared variable outside a kernel"),
    "an unknown setting": ("config { banana: 1 }\n", "TW011", "banana"),
    **{
        name: ("pipeline go(x) {\n    let y = compute(x) {\n        @kernel elementwise\n" + indent(body, " " * 8) + "\n    }\n    return y\n}\n", code, words)
        for name, (body, code, words) in ZYN.items()
    },
}  # fmt: skip


def _run(path: Path, text: str) -> object:
    program = tw.load(path)
    return program.go(X) if "pipeline go" in text else program.run()


@pytest.mark.parametrize("name", ZYN_PROGRAMS)
def test_zyn_programs_refuse_what_they_would_drop(name: str, tmp_path: Path) -> None:
    text, code, words = ZYN_PROGRAMS[name]
    path = tmp_path / "program.zyn"
    path.write_text(text)
    with pytest.raises(tw.TilewrightError) as error:
        _run(path, text)
    assert f"error[{code}]" in str(error.value)
    assert words in str(error.value)


# -- conditions and sizes -----------------------------------------------------------------------------------------------

GUARDED = {
    "a variable": "ok = 0 <= j + 1 < cols\n            if ok:\n                total += x[i, j] * v[r] * w[i, r]",
    "a conditional expression": "total += x[i, j] * v[r] * w[i, r] if 0 <= j + 1 < cols else 0.0",
    "what stands after and": "hit = 0 <= j + 1 < cols and w[i, r] > 0.0\n            total += v[r] if hit else 0.0",
    "a number": "if s > 0.0:\n                total += x[i, j] * v[r] * w[i, r]",
}


@pytest.mark.parametrize("name", GUARDED)
def test_conditions_excuse_only_the_indices_they_speak_of(name: str) -> None:
    kernel = defined(
        "@tw.kernel\ndef k(x, v, w, s):\n    rows, cols = x.shape\n    taps, = v.shape\n    out = tw.zeros((rows, cols), tw.f32)\n"
        "    for i, j in tw.grid(rows, cols):\n        total = 0.0\n        for r in range(taps):\n"
        f"            {GUARDED[name]}\n        out[i, j] = total\n    return out\n", tw,
    )  # fmt: skip
    x, v = np.ones((4, 6), np.float32), np.ones(3, np.float32)
    assert np.asarray(kernel(x, v, np.ones((4, 3), np.float32), 1.0)).shape == (4, 6)
    with pytest.raises(tw.TilewrightError, match="axis 1 of 'w' is 5, but 'taps' is 3"):
        kernel(x, v, np.ones((4, 5), np.float32), 1.0)
    with pytest.raises(tw.TilewrightError, match="axis 0 of 'w' is 5, but 'rows' is 4"):
        kernel(x, v, np.ones((5, 3), np.float32), 1.0)
