"""Assignments to parts of arrays, lists and records in the host part of ZynML programs."""

from __future__ import annotations

import time

import numpy as np
import pytest

import tilewright as tw
from copy_kernels import register_copies
from null_cuda.install import installed

X = np.arange(6, dtype=np.float32)
INPUTS = {"x": X, "i": np.arange(3, dtype=np.int8), "w": np.float64(3)}


def run(text: str, **inputs: object) -> dict[str, object]:
    return tw.load(text).run(device="cpu", **inputs)


def values(text: str, name: str = "a") -> object:
    module = tw.load(text + "\n")
    found = module.run(device="cpu", **{n: INPUTS[n] for n in module.inputs()})[name]
    return found.tolist() if isinstance(found, np.ndarray) else found


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("var a = x\na[0] = 5", [5, 1, 2, 3, 4, 5]),
        ("var a = x\na[-1] += 2.5", [0, 1, 2, 3, 4, 7.5]),
        ("var a = x\na[1:3] = 7.0", [0, 7, 7, 3, 4, 5]),
        ("var a = x\na[1:3] = [8, 9.5]", [0, 8, 9.5, 3, 4, 5]),
        ("var a = zeros(2, 3)\na[1] = x[0:3]\na[:, 0] = [1, 2]", [[1, 0, 0], [2, 1, 2]]),
        ("var a = zeros(2, 3)\na[:, :] = x[0:3] * 2", [[0, 2, 4], [0, 2, 4]]),
        ("var a = i\na[0] = -128", [-128, 1, 2]),
        ("var a = [1, 2, 3]\na[1] = \"two\"", [1, "two", 3]),
        ("var a = {b: 1}\na.b = 2\na.c = [4, 5]\na.c[0] = 6\na[\"d\"] = 7", {"b": 2, "c": [6, 5], "d": 7}),
        ("var a = [{b: [0, 1]}]\na[0].b[1] = 2", [{"b": [0, 2]}]),
        ("var a = 1\nvar c = x\n(a, c[2]) = (c[2], 9)\nlet b = c[2]\na = a + b", 11),
        ("var a = zeros(5)\nfor k in 1..5:\n    a[k] = a[k - 1] + k", [0, 1, 3, 6, 10]),
        ("var a = x\nif a[0] == 0:\n    a[0] = -1", [-1, 1, 2, 3, 4, 5]),
        ("fn f(z):\n    var y = z\n    y[0] = 9\n    return y\nlet a = f(x)", [9, 1, 2, 3, 4, 5]),
        ("var a = x * 2\nlet b = compute(a) {\n    for k in 0..n: out[k] = a[k] + 1\n}\na[0] = 100", [100, 2, 4, 6, 8, 10]),
    ],
)  # fmt: skip
def test_parts(text: str, wanted: object) -> None:
    assert values(text) == wanted
    assert X.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "before",
    [
        "let b = a",
        "let b = a[0:6]",
        "let b = [a]",
        "let b = {of: a}",
        "let b = reshape(a, [2, 3])",
        "let b = a.T",
        "var b = 0\nb = a",
    ],
)
def test_other_names_keep_what_they_had(before: str) -> None:
    found = run(f"var a = x * 1\na[1] = 7\n{before}\na[0] = 5\na[0] = 6\n", x=X)
    kept = found["b"]
    kept = kept[0] if isinstance(kept, list) else kept["of"] if isinstance(kept, dict) else kept
    assert np.asarray(kept).ravel().tolist() == [0, 7, 2, 3, 4, 5]
    assert found["a"].tolist() == [6, 7, 2, 3, 4, 5]  # type: ignore[attr-defined]


def test_lists_and_records_keep_what_they_had() -> None:
    found = run("var a = [1, 2]\nlet b = a\na[0] = 9\nvar r = {p: a}\nlet s = r\nr.p[1] = 8\nr.q = 1\n")
    assert found == {"a": [9, 2], "b": [1, 2], "r": {"p": [9, 8], "q": 1}, "s": {"p": [9, 2]}}


def test_asynchronous_blocks_have_read_what_was_there() -> None:
    text = "var a = x * 1\nlet f = compute(a) @async {\n    for k in 0..n: out[k] = a[k] * 2\n}\na[0] = 50\nlet y = await f\n"
    for _ in range(20):
        assert run(text, x=X)["y"].tolist() == [0, 2, 4, 6, 8, 10]  # type: ignore[attr-defined]


def test_an_array_of_its_own_is_changed_in_place() -> None:
    """Each assignment takes the same processor time, however long the array is."""
    text = "var a = zeros(count)\nfor k in 0..2000: a[k] = k\n"

    def seconds(count: int) -> float:
        module = tw.load(text)
        module.run(count=count)
        start = time.process_time()
        assert module.run(count=count)["a"][1999] == 1999  # type: ignore[index]
        return time.process_time() - start

    assert min(seconds(4_000_000) for _ in range(3)) < 10 * min(seconds(2000) for _ in range(3)) + 1.0


def test_arrays_on_a_gpu() -> None:
    with installed(mode="random") as driver:
        register_copies(driver)
        found = run('var a = x.to_device("cuda")\nlet b = a\na[0] = 5\na[1:3] = a[4:6]\na[5] = x[3]\n', x=X)
        assert found["a"].numpy().tolist() == [5, 4, 5, 3, 4, 3]  # type: ignore[attr-defined]
        assert found["b"].numpy().tolist() == X.tolist()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("let y = x\nx[0] = 1", "2:1: error[TW015]: 'x' is an input and cannot be assigned"),
        ("let a = x\na[0] = 1", "2:1: error[TW015]: 'a' was declared with let and cannot be assigned"),
        ("let a = {b: 1}\na.b = 1", "2:1: error[TW015]: 'a' was declared with let and cannot be assigned"),
        ("a[0] = x", "1:1: error[TW015]: 'a' is not declared and cannot be assigned"),
        ("str(x)[0] = 1", "1:1: error[TW015]: this is no place that can be assigned"),
        ("var a = x\na[9] = 1", "2:1: error[TW013]: index 9 on axis 0, which has 6 element(s)"),
        ("var a = x\na[-7] = 1", "2:1: error[TW013]: index -7 on axis 0, which has 6 element(s)"),
        ("var a = x\na[0, 0] = 1", "2:1: error[TW003]: 2 index(es) into an array of rank 1"),
        ("var a = x\na[1.5] = 1", "2:3: error[TW003]: an index is 1.5, no whole number"),
        ("var a = x\na[0:2] = [1, 2, 3]", "2:1: error[TW004]: a part of shape [2] is assigned an array of shape [3]"),
        ("var a = [1]\na[4] = 1", "2:1: error[TW013]: index 4 of a list of 1 element(s)"),
        ("var a = 3\na[0] = 1", "2:1: error[TW009]: a part of a number cannot be assigned"),
        ("var a = x\na.b = 1", "2:1: error[TW009]: '.b' of an array cannot be assigned"),
        ("var a = i\na[0] = 0.5", "2:1: error[TW006]: 0.5 is assigned to an array of i8, which cannot hold it"),
        ("var a = i\na[0] = 300", "2:1: error[TW006]: 300 is assigned to an array of i8, which cannot hold it"),
        ("var a = x\na[0] = true", "2:1: error[TW006]: true is assigned to an array of f32, which cannot hold it"),
        ("var a = x\na[0] = w", "2:1: error[TW006]: a value of type f64 is assigned to an array of f32, which would lose data"),
        ("var a = x\na[0] = \"s\"", "2:1: error[TW009]: a str is assigned to a part of an array"),
        ("var a = {b: 1}\na[0] = 2", "2:1: error[TW003]: a field of a record has a name"),
    ],
)  # fmt: skip
def test_refused(text: str, said: str) -> None:
    with pytest.raises(tw.UserError) as caught:
        values(text)
    assert str(caught.value).splitlines()[0] == f"<string>:{said}"


def test_an_index_that_is_missing_is_an_input() -> None:
    assert tw.load("var a = [1, 2]\na[k] = 3\n").inputs() == ("k",)
