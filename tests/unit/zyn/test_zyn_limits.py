"""ZynML programs at the edges: 64-bit integers, endless numbers, huge arrays, recursion and depth. Results, or errors of ours."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw
from tilewright.zyn.host import values

LOW, HIGH = -(1 << 63), (1 << 63) - 1


def run(text: str, **inputs: object) -> object:
    return tw.load(f"let r = {text}").run(**inputs)["r"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2 ** 100", 0), ("2 ** 63", LOW), ("3 ** 41", 3**41), ("9223372036854775807 + 1", LOW), ("-9223372036854775807 - 2", HIGH),
        ("9223372036854775807 * 2", -2), ("4294967296 * 4294967296", 0), ("1 << 63", LOW), ("1 << 64", 1), ("1 << 65", 2), ("-1 >> 70", -1), ("1 << -1", LOW), ("~9223372036854775807", LOW),
        ("-(-9223372036854775807 - 1)", LOW), ("(-9223372036854775807 - 1) / -1", LOW), ("(-9223372036854775807 - 1) % -1", 0), ("-7 / 2", -4), ("-7 % 4", 1), ("2 ** -1", 0.5),
        ("9 ** 9 ** 9", pow(9, pow(9, 9), 1 << 64)), ("i8(200)", -56), ("u8(-1)", 255), ("cast(4294967299, i32)", 3), ("18446744073709551615 + 0", -1), ("0 ** 0", 1), ("true + true", 2),
    ],
)  # fmt: skip
def test_integers_have_64_bits(text: str, value: object) -> None:
    wanted = (value + (1 << 63)) % (1 << 64) - (1 << 63) if isinstance(value, int) else value
    assert run(text) == wanted
    assert isinstance(run(text), int | float | np.generic)


def test_the_host_counts_as_kernels_do() -> None:
    """The same operators on arrays of i64, which kernels compute."""
    generator = np.random.default_rng(5)
    edges = [0, 1, -1, 2, 63, 64, -64, LOW, HIGH, 1 << 32]
    a = np.array([*edges, *generator.integers(LOW, HIGH, 20)], np.int64)
    b = np.array([*reversed(edges), *generator.integers(-70, 70, 20)], np.int64)
    for op in ("+", "-", "*", "&", "|", "^", "<<", ">>"):
        found = tw.load(f"let r = compute(a, b) {{ for i in 0..n: out[i] = a[i] {op} b[i] }}").run(a=a, b=b)["r"]
        assert [values.binary(op, int(x), int(y)) for x, y in zip(a, b)] == found.tolist(), op


def test_runs_again_count_the_same() -> None:
    program = tw.load("let r = n * 4 + m ** 3\nlet s = x * 2.0")
    for _ in range(4):
        found = program.run(n=1 << 62, m=1 << 30, x=np.ones(2, np.float32))
        assert found["r"] == 0
    with pytest.raises(tw.UserError, match="no 64-bit integer holds"):
        program.run(n=1 << 63, m=1, x=np.ones(2, np.float32))


@pytest.mark.parametrize(
    "text",
    [
        "zeros(1000000000000000)", "zeros(4294967296, 4294967296)", "ones([9223372036854775807])", "full([1000000000000000], 1)", "zeros([" + "1, " * 99 + "1])", "zeros(-1)",
        "zeros(inf)", "zeros(0.5)", 'zeros("a")', "full([2], inf, dtype=i8)", "reshape(zeros(4), [inf])", "split(zeros(4), 0)", "split(zeros(4), 4294967296)", "[1, 2][inf]", "[1][inf - inf]",
        "[1][9223372036854775807]", "zeros(3)[9223372036854775807]", "1 / 0", "1 % 0", "(1 / (3 - 3))", "i32(inf)", "i64(inf - inf)", '"a" * 3', "[1] - [1]", "{a: 1} + 1", "f32 + 1", "1 @ 2",
        "concat([])", "len(3)", "transpose(3)", "99999999999999999999", "9" * 5000, "9" * 5000 + "KB", "1e999", "99999999999999999999KB",
    ],
)  # fmt: skip
def test_what_has_no_value_is_an_error_of_ours(text: str) -> None:
    with pytest.raises(tw.TilewrightError) as caught:
        run(text)
    assert caught.value.code != "TW040"


@pytest.mark.parametrize("text", ["for i in 0..inf: print(i)", "for i in 0..3 step 0: print(i)", "for i in 0..0.5: print(i)", 'for i in 0.."s": print(i)', "let y: i8 = inf", "for i in 3: print(i)"])
def test_loops_and_types_without_a_meaning(text: str) -> None:
    with pytest.raises(tw.UserError):
        tw.load(text + "\n").run()


def run_with_arrays(text: str) -> None:
    module = tw.load(text)
    module.run(**{name: np.ones(2, np.float32) for name in module.inputs()})


RECURSIVE = [
    "fn f(x):\n    return f(x)\nlet y = f(1)", "fn f(x):\n    return g(x)\nfn g(x):\n    return f(x)\nlet y = f(1)", "fn f(x): return x + f(x)\nlet y = f(z)",
    "fn f(x):\n    print(x)\n    return f(x)\nlet y = f(1)", "fn f(x): return f(x)\nlet y = compute(a) { for i in 0..n: out[i] = f(a[i]) }", "pipeline f(x):\n    return f(x)\nlet y = f(1)",
    "fn f(x): return g(x)\nfn g(x): return h(x)\nfn h(x): return f(x) + 1\nlet y = 1 |> f()", "fn f(x, y = f(1)): return x\nlet z = f(1)",
]  # fmt: skip


@pytest.mark.parametrize("text", RECURSIVE)
def test_functions_that_call_themselves(text: str) -> None:
    with pytest.raises(tw.UserError) as caught:
        run_with_arrays(text)
    assert caught.value.code == ("TW002" if "y = f(1))" in text else "TW005")


def test_many_functions_inside_one_another() -> None:
    for count in (50, 600):
        for body in ("return f{}(x) + 1", "print(x)\n    return f{}(x) + 1"):
            text = "".join(f"fn f{i}(x):\n    {body.format(i + 1)}\n" for i in range(count)) + f"fn f{count}(x): return x\nlet y = f0(0)\n"
            try:
                assert tw.load(text).run()["y"] == count
            except tw.UserError as error:
                refused = str(error)
                assert count > 50, refused


def test_deep_and_long_texts() -> None:
    deep = "".join("    " * i + f"for i{i} in 0..1:\n" for i in range(400)) + "    " * 400 + "print(1)\n"
    nested = "var y = 0\n" + "".join("    " * i + "if y < 1:\n" for i in range(90)) + "    " * 90 + "y = 1\n"
    assert tw.load(nested).run()["y"] == 1
    for text in (deep, "let y = [" + "1, " * 100_000 + "1]\n", "let y = " + "[" * 90 + "]" * 90 + "\n", 'let y = "' + "a" * 1_000_000 + '"\n', "let " + "y" * 100_000 + " = 1\n"):
        try:
            tw.load(text).run()
        except tw.TilewrightError as error:
            code = error.code
            assert code != "TW040"
