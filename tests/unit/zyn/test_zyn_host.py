"""The host language of ZynML: statements, functions, records, imports, files, errors; mostly without a compiler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewright as tw
from copy_kernels import register_copies
from null_cuda.install import installed


def run(text: str, **inputs: Any) -> dict[str, Any]:
    return tw.load(text + "\n").run(device="cpu", **inputs)


def errors(text: str, **inputs: Any) -> list[str]:
    """The first lines of all messages, without the name of the text."""
    with pytest.raises(tw.UserError) as caught:
        run(text, **inputs)
    return [d.render().split("\n")[0].removeprefix("<string>:") for d in caught.value.diagnostics]


# -- statements -------------------------------------------------------------------------------------------------------


def test_loops_and_conditions() -> None:
    found = run("""
var total = 0
for i in 0..10 step 3:
    total += i
var pairs = []
for i in 0..2, j in 0..=1:
    pairs = pairs + [(i, j)]
for n in 3..0 step -1: pairs = pairs + [(n, n)]
var power = 1
while power < 100 and power > 0:
    power *= 3
var word = ""
if power > 200:
    word = "large"
elif power > 100 {
    word = "middle"
} else:
    word = "small"
let text = word + "!" + str(power)
for (name, value) in [("a", 1), ("b", 2)]:
    total += value
""")
    pairs = [(0, 0), (0, 1), (1, 0), (1, 1), (3, 3), (2, 2), (1, 1)]
    assert found == {"total": 21, "pairs": pairs, "power": 243, "word": "large", "text": "large!243"}


def test_what_a_block_declares_ends_with_it() -> None:
    found = run("let x = 1\nvar y = 0\nif true:\n    let x = 5\n    let z = x\n    y = z\nfor x in [7, 8]: y += x")
    assert found == {"x": 1, "y": 20}
    assert errors("if true:\n    let z = 1\nlet w = z") == ["3:9: error[TW008]: missing input 'z'"]


def test_conditions_leave_out_what_is_decided() -> None:
    assert run("let xs = [1]\nlet n = 1\nlet a = n < 1 and xs[n] == 1\nlet b = n > 0 or xs[n] == 1\nlet c = xs[n] if n < 1 else 5") == {
        "xs": [1], "n": 1, "a": False, "b": True, "c": 5,
    }  # fmt: skip


def test_values() -> None:
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    found = run(
        """
let shape = x.shape
let rows = x.shape[0]
let corner = x[1:3, 0]
let last = x[-1]
let same = shape == (3, 4) and x.dtype == f32
let (a, b) = split(x, 2, axis=-1)
let (first, rest) = split(x, [1, 2])
let whole = concat([a, b], axis=1)
let flat = reshape(x.T, [-1])
let moved = transpose(reshape(x, [3, 2, 2]), [2, 0, 1])
let filled = full([2], 1.5, dtype=f64)
let half = cast(x, f16)
let small = f16(1.5)
let product = x @ transpose(x)
let inner = dot(x[0], x[1])
""",
        x=x,
    )
    assert found["shape"] == (3, 4) and found["rows"] == 3 and found["same"] is True
    for name, wanted in {
        "corner": x[1:3, 0], "last": x[-1], "a": x[:, :2], "b": x[:, 2:], "first": x[:1], "rest": x[1:], "whole": x, "flat": x.T.reshape(-1),
        "moved": x.reshape(3, 2, 2).transpose(2, 0, 1), "filled": np.full(2, 1.5), "product": x @ x.T, "inner": x[0] @ x[1],
    }.items():  # fmt: skip
        np.testing.assert_array_equal(found[name], wanted, err_msg=name)
    assert found["half"].dtype == np.float16 and found["small"] == np.float16(1.5) and type(found["small"]) is np.float16


def test_print(capsys: pytest.CaptureFixture[str]) -> None:
    run('print("x is", x, true, {a: "b", c: [1, 2]}, (1,))\nprint()', x=np.array([1.0, 2.5]))
    assert capsys.readouterr().out == 'x is [1. , 2.5] true {a: "b", c: [1, 2]} (1,)\n\n'


# -- functions --------------------------------------------------------------------------------------------------------


def test_functions() -> None:
    text = """
fn pick(xs: list, which: int = 0, name: string = "none"):
    for x in xs:
        if which == 0:
            return {value: x, name: name}
    return {value: -1, name: name}
fn ends(x: tensor[n]):
    let low = reduce(min, x)
    return low, reduce(max, x), n
let a = pick([4, 5])
let b = pick([], name="empty")
let (low, high, n) = ends(x)
let c = [7, 8] |> pick(name="piped")
"""
    found = run(text, x=np.array([3.0, 1.0, 2.0]))
    assert found["a"] == {"value": 4, "name": "none"} and found["b"] == {"value": -1, "name": "empty"}
    assert (found["low"], found["high"], found["n"]) == (1.0, 3.0, 3) and found["c"] == {"value": 7, "name": "piped"}


def test_locals_do_not_leave_a_function() -> None:
    text = "fn f(x):\n    var y = x\n    if y > 1: y = 10\n    return y + z\nlet z = 100\nfn g(z):\n    print(z)\n    return f(z)\nlet a = g(2)"
    assert run(text) == {"z": 100, "a": 110}


def test_names_of_a_function_are_those_of_the_program() -> None:
    """Also in a function that is part of a kernel, and where its caller has another value of that name."""
    text = "let z = 100.0\nfn f(x): return x + z\nfn g(x, z):\n    print(z)\n    return f(x) * z\nlet a = g(x, 2.0)\nlet b = g(1, 2)\n"
    found = run(text, x=np.ones(2, np.float32))
    np.testing.assert_array_equal(found["a"], [202, 202])
    assert found["b"] == 202


def test_functions_that_are_not_called_are_checked() -> None:
    assert errors("fn f(x):\n    print(x)\n    let y = sqr(x)\n    return y * missing\nlet a = 1") == ["3:13: error[TW002]: unknown function 'sqr'"]
    assert run("fn f(x):\n    return x * missing\nlet a = 1") == {"a": 1}


X = np.ones((2, 3), np.float32)
TYPED = 'fn f(a: tensor[n, k], b: tensor[k, m] = zeros(3, 1), c: int = 1) -> tensor[n, m]:\n    print("")\n    return a @ b\n'


@pytest.mark.parametrize(
    ("call", "line"),
    [
        ("f(x, zeros(4, 2))", "4:9: error[TW004]: f: 'k' is 3 by axis 1 of 'a', but 4 by axis 0 of 'b'"),
        ("f(x[0])", "4:9: error[TW003]: f: 'a' has rank 1 (shape [3]), its type rank 2"),
        ("f(3)", "4:9: error[TW009]: f: 'a' is a int, its type is an array of rank 2"),
        ("f(x, c=1.5)", "4:9: error[TW009]: f: 'c' is 1.5, its type says int"),
        ("f(x, zeros(3, 1), 1, 2)", "4:9: error[TW016]: f(a, b, c) takes 3 argument(s), got 4"),
        ("f(c=2)", "4:9: error[TW016]: f(a, b, c) lacks 'a'"),
        ("f(x, d=2)", "4:9: error[TW016]: f(a, b, c) has no parameter 'd'"),
        ("f(x, a=x)", "4:9: error[TW016]: f(a, b, c) gets 'a' twice"),
    ],
)
def test_calls_are_checked(call: str, line: str) -> None:
    assert errors(f"{TYPED}let y = {call}\nlet used = x", x=X) == [line]


def test_computed_extents() -> None:
    text = 'fn f(a: tensor[n, n + k]) -> tensor[2 * n]:\n    print("")\n    return a[0]\nlet y = f(x)'
    assert run(text.replace("2 * n", "n + k"), x=X, k=1)["y"].shape == (3,)
    assert errors(text, x=X, k=1) == ["4:9: error[TW004]: f: axis 0 of the result has 3 element(s), its type says 4"]
    assert errors(text, x=X, k=2) == ["4:9: error[TW004]: f: axis 1 of 'a' has 3 element(s), its type says 4"]
    assert errors(text, x=X) == ["1:23: error[TW008]: missing input 'k'"]
    assert errors("let c: tensor[2 * q] = x", x=X) == ["1:19: error[TW008]: missing input 'q'"]


def test_calls_of_functions_in_kernels_are_checked_too() -> None:
    text = "fn f(a: tensor[n, k], c: int = 1) -> tensor[k, n]:\n    return a * c\nlet y = "
    assert errors(text + "f(x)", x=X) == ["3:9: error[TW004]: f: 'k' is 3 by axis 1 of 'a', but 2 by axis 0 of the result"]
    assert errors(text + "f(x, 1.5)", x=X) == ["3:9: error[TW009]: f: 'c' is 1.5, its type says int"]
    assert errors(text + "x |> f(c=z)", x=X, z=0.5) == ["3:9: error[TW009]: f: 'c' is 0.5, its type says int"]
    np.testing.assert_array_equal(run(text.replace("[k, n]", "[n, k]") + "f(x, c=3)", x=X)["y"], X * 3)
    np.testing.assert_array_equal(run(text.replace("[k, n]", "[n, n + 1]") + "f(x + 1)", x=X)["y"], X + 1)


def test_functions_may_return_futures() -> None:
    text = "fn f(a: tensor[n, k]) -> tensor[n, k]:\n    return compute(a) @async { out = a + 1 }\nlet y = f(x)\nlet z = await y\nlet w = f(y)"
    found = run(text, x=X)
    assert isinstance(found["y"], tw.Future)
    np.testing.assert_array_equal(found["z"], X + 1)
    np.testing.assert_array_equal(found["w"].result(), X + 2)


def test_results_are_checked() -> None:
    text = 'fn f(a: tensor[n, k]) -> tensor[k, n]:\n    print("")\n    return a\nlet y = f(x)'
    assert errors(text, x=X) == ["4:9: error[TW004]: f: 'k' is 3 by axis 1 of 'a', but 2 by axis 0 of the result"]


def test_declared_types() -> None:
    found = run("let a: f16 = 1.5\nlet b: int = 3\nlet c: tensor[b, m] = x.T\nvar d: i32 = 2.0\n", x=X)
    assert type(found["a"]) is np.float16 and found["b"] == 3 and found["c"].shape == (3, 2) and type(found["d"]) is np.int32
    assert errors("let n = 5\nlet c: tensor[n, m] = x", x=X) == ["2:1: error[TW004]: let: 'n' is 5 by the program, but 2 by axis 0 of 'c'"]
    assert errors("let c: int = 1.5") == ["1:1: error[TW009]: let: 'c' is 1.5, its type says int"]
    assert errors("let c: f16[n] = x[0]", x=X) == ["1:1: error[TW009]: let: 'c' is an array of f32, its type says f16"]


def test_functions_are_called_from_python() -> None:
    module = tw.load("let unused = missing + 1\nlet base = scale * 2\nfn f(x, by = 3): return x * by + base\nfn g(r): return r.a + f(r.b)\n")
    assert module.functions() == ("f", "g")
    assert module.f(2.0, scale=1.0) == 8.0
    assert module.f(2.0, by=1, scale=1.0) == 4.0
    assert module.g({"a": 1, "b": 2}, scale=0) == 7
    np.testing.assert_array_equal(module.f(np.ones(3, np.float32), scale=1.0, device="emulator"), np.full(3, 5))
    with pytest.raises(tw.UserError, match=r"f\(x, by\) takes 2 argument\(s\), got 3"):
        module.f(1, 2, 3)
    with pytest.raises(tw.UserError, match=r"f\(x, by\) lacks 'x'"):
        module.f()
    with pytest.raises(tw.UserError, match="missing input 'scale'"):
        module.f(1)
    with pytest.raises(AttributeError, match="no function 'h'; it has f, g"):
        module.h  # noqa: B018


# -- sizes ------------------------------------------------------------------------------------------------------------

BLOCKED = """
fn f(x: tensor[rows, n], width: int):
    let note = "by blocks"
    return compute(x) {
        for i in 0..rows:
            for block in 0..n step 8:
                let part = x[i, block:block+8]
                out[i, block:block+8] = part * width
    }
let y = f(x, 3)
"""


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_sizes_of_a_function_are_sizes_of_its_blocks(device: str) -> None:
    """`n` is a number of the function and the extent a step walks: it is no argument of the kernel, `width` is."""
    x = np.arange(40, dtype=np.float32).reshape(2, 20)
    np.testing.assert_array_equal(tw.load(BLOCKED).run(device=device, x=x)["y"], x * 3)


def test_sizes_that_disagree_are_found() -> None:
    text = BLOCKED.replace("tensor[rows, n]", "tensor[rows, columns]").replace("let note", "let n = columns / 2\n    let note")
    assert errors(text, x=np.ones((2, 20), np.float32)) == ["7:29: error[TW004]: 'n' is 10, but axis 1 of 'x' has 20 element(s)"]


# -- errors before anything runs --------------------------------------------------------------------------------------


def test_all_errors_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    text = """
print("never")
let a = compute(x) { out = x }
let b = await a
let c = reshape(x)
let d = x.to_devise("cpu")
let e = split(x, 2, axes=1)
fn f(x):
    print(x)
    return x
    let late = await x
let g = f(1)
fn nothing(x): print(x)
let h = nothing(1)
nothing(2)
return 3
yield 4
let i = zeroes(2)
let j = x |> sqrt(axis=1)
"""
    assert errors(text, x=np.ones(2)) == [
        "4:9: error[TW009]: await of 'a', which is no future",
        "5:9: error[TW016]: reshape lacks 'shape'",
        "6:9: error[TW002]: unknown method '.to_devise'",
        "7:9: error[TW016]: split has no parameter 'axes'",
        "11:5: error[TW005]: this await is never reached: line 10 has returned",
        "13:1: error[TW017]: 'nothing' returns nothing",
        "16:1: error[TW005]: return outside a function",
        "17:1: error[TW005]: this is never reached: line 16 has returned",
        "17:1: error[TW005]: yield outside a kernel",
        "18:1: error[TW005]: this is never reached: line 16 has returned",
        "18:9: error[TW002]: unknown function 'zeroes'",
        "19:1: error[TW005]: this is never reached: line 16 has returned",
        "19:14: error[TW016]: 'sqrt' takes no keywords",
    ]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("let y = reshape(x, [4, 2])", "1:9: error[TW004]: an array of shape [2, 3] (6 elements) cannot have shape [4, 2]"),
        ("let y = split(x, 2, axis=1)", "1:9: error[TW004]: axis 1 has 3 elements, which cannot be split into 2 equal parts"),
        ("let y = split(x, 2, axis=2)", "1:9: error[TW003]: axis 2 of an array of rank 2"),
        ("let y = concat([x, zeros(2, 2)])", "1:9: error[TW004]: part 0 has shape [2, 3], part 1 [2, 2]: they differ beside axis 0"),
        ("let y = concat([x, zeros([2, 3], dtype=f64)])", "1:9: error[TW006]: part 0 is float32, part 1 float64"),
        ("let y = transpose(x, [0, 0])", "1:9: error[TW003]: axes [0, 0] are not an order of the 2 axes of the array"),
        ("let y = zeros(2.5) + x", "1:9: error[TW009]: an extent is 2.5, no whole number"),
        ("let y = x.length", "1:9: error[TW002]: an array has no 'length'"),
        ("let y = {a: x}.b", "1:9: error[TW002]: there is no 'b' in this record"),
        ("if x: print(1)", "1:4: error[TW009]: the condition of 'if' is an array of shape [2, 3]"),
        ("for i in x.shape[0]: print(i)", "1:10: error[TW009]: a loop over a int"),
        ("for i in 0..2 step 0: print(x)", "1:10: error[TW016]: a loop with step 0 has no end"),
        ('let y = "a" - x.ndim', "1:9: error[TW009]: arithmetic with a str"),
        ("let y = allocate(shape=[2], dtype=x)", "1:9: error[TW009]: [[1., 1., 1.],"),
        ('let y = x.to_device("cpu", copy=1)', "1:9: error[TW009]: copy=1 is neither true nor false"),
        ("let y = x.free(x)", "1:9: error[TW009]: '.free()' of a ndarray"),
        ('let y = read("nowhere.npy") + x', "1:9: error[TW007]: file 'nowhere.npy' does not exist"),
        ("let y = compute(x) @device(3) { out = x }", "1:20: error[TW009]: @device takes a name or a list of names, got a int"),
        ("let y = compute(z) { out = z }\nlet z2 = x", "1:17: error[TW009]: 'z' is a list, a kernel takes numbers and arrays"),
    ],
)
def test_errors_at_run_time(text: str, line: str) -> None:
    given = {"z": [1, 2]} if "z2" in text else {}
    assert errors(text, x=X, **given) == [line]


# -- devices ----------------------------------------------------------------------------------------------------------


def test_a_device_is_any_string_or_the_first_of_a_list() -> None:
    text = 'let where = "emulator"\nlet a = compute(x) @device(where) { out = x + 1 }\nlet b = compute(x) @device(["cuda:7", "cpu"]) { out = x + 2 }'
    found = run(text, x=X)
    np.testing.assert_array_equal(found["a"], X + 1)
    np.testing.assert_array_equal(found["b"], X + 2)
    with pytest.raises(tw.UserError, match="unknown device 'tpu'"):
        run('let b = compute(x) @device(["tpu", "cpu"]) { out = x + 2 }', x=X)
    with pytest.raises(tw.DeviceError, match="'cuda:7' is not present"):
        run('let b = compute(x) @device(["cuda:6", "cuda:7"]) { out = x + 2 }', x=X)


GPU = """
let (a, b) = split(x, 2, axis=1)
let c = concat([b, a], axis=1)
let d = reshape(transpose(c), [-1])
let e = zeros(2, 2, device="cuda") + 1
let f = full([2], 2.5, dtype=f64, device="cuda")
var n = 0
if reduce(max, x) > 0: n = 1
for row in x: n += 1
let s = x[0, 1:3]
let home = x.to_device("cpu")
let again = copy(x)
"""


@pytest.mark.parametrize("mode", ["eager", "lazy", "random"])
def test_arrays_on_a_gpu(mode: str) -> None:
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    with installed(mode=mode) as driver:
        register_copies(driver)
        found = tw.load(GPU).run(x=tw.to_device(x, "cuda"))
        turned = np.concatenate([x[:, 2:], x[:, :2]], 1)
        for name, wanted in {
            "a": x[:, :2], "b": x[:, 2:], "c": turned, "d": turned.T.reshape(-1), "e": np.ones((2, 2)), "f": np.full(2, 2.5), "s": x[0, 1:3],
            "home": x, "again": x,
        }.items():  # fmt: skip
            assert isinstance(found[name], np.ndarray) is (name == "home"), name
            np.testing.assert_array_equal(np.asarray(found[name]), wanted, err_msg=name)
        assert found["n"] == 4


# -- imports ----------------------------------------------------------------------------------------------------------


def test_imports(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "base.zyn").write_text("let eps = 0.5\nfn shift(x, eps): return x + eps\n")
    (tmp_path / "parts" / "layers.zyn").write_text(
        'import "base.zyn" as base\nlet twice = base.eps * 2\nfn norm(x): return base.shift(x, twice) * scale\nfn inside(v): return v * 2 + base.eps\n'
    )
    (tmp_path / "main.zyn").write_text(
        'import "parts/layers.zyn" as layers\nimport "parts/base.zyn"\nlet y = layers.norm(x)\nlet z = shift(x, eps) + layers.twice\n'
        "let w = compute(x) { for i in 0..n: out[i] = layers.inside(x[i]) }\n"
    )
    module = tw.load(tmp_path / "main.zyn")
    assert module.inputs() == ("x", "scale")
    found = module.run(x=np.ones(2, np.float32), scale=10.0)
    assert list(found) == ["eps", "y", "z", "w"]
    np.testing.assert_array_equal(found["y"], np.full(2, 20.0))
    np.testing.assert_array_equal(found["z"], np.full(2, 2.5))
    np.testing.assert_array_equal(found["w"], np.full(2, 2.5))


def test_wrong_imports(tmp_path: Path) -> None:
    (tmp_path / "a.zyn").write_text('import "b.zyn" as b\nlet x = 1\n')
    (tmp_path / "b.zyn").write_text('import "a.zyn" as a\nlet y = 1\n')
    with pytest.raises(tw.UserError) as caught:
        tw.load(tmp_path / "a.zyn")
    circle = "'a.zyn' imports 'b.zyn' imports 'a.zyn': files cannot import each other in a circle"
    assert str(caught.value).split("\n")[0] == f"{tmp_path}/b.zyn:1:1: error[TW005]: {circle}"
    (tmp_path / "c.zyn").write_text('import "gone.zyn" as gone\nimport "missing.zyn"\n')
    with pytest.raises(tw.UserError) as caught:
        tw.load(tmp_path / "c.zyn")
    assert [d.message for d in caught.value.diagnostics] == [f"file '{tmp_path}/{n}.zyn' does not exist" for n in ("gone", "missing")]
    (tmp_path / "b.zyn").write_text("let y = 1\n")
    (tmp_path / "a.zyn").write_text('import "b.zyn" as b\nlet x = b.z\n')
    with pytest.raises(tw.UserError, match=r"a.zyn:2:9: error\[TW002\]: 'b' has no 'z'"):
        tw.load(tmp_path / "a.zyn")


def test_a_number_goes_to_the_host() -> None:
    """The sum of an array that host and device share is a number: it is there already."""
    found = run('let total = reduce(+, x).to_device("cpu") * 2.0', x=np.arange(5, dtype=np.float32))
    assert found["total"] == 20.0
