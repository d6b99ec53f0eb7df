"""What stands before functions and in types of ZynML: it acts, or is refused with the reason."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw

X = np.ones((4, 4), np.float32)
DOUBLE = "pipeline f(x: {type}):\n    return x * 2\nlet y = f(x)\n"


def wrong(text: str, **inputs: object) -> str:
    with pytest.raises(tw.TilewrightError) as caught:
        tw.load(text).run(**inputs)
    first = caught.value.diagnostics[0]
    return f"{first.code}: {first.message}" + (f" ({first.help})" if first.help else "")


@pytest.mark.parametrize(
    ("type_", "message"),
    [
        ("tensor[n] * 3", "TW016: this is no type"),
        ("3", "TW016: this is no type"),
        ("tnsor[n, m]", "TW002: unknown type 'tnsor' (did you mean 'tensor'?)"),
        ("recrd", "TW002: unknown type 'recrd' (did you mean 'record'?)"),
        ("tensor[4, 4, bf16]", "TW009: f's 'x' must be bf16, got f32"),
        ("tensor[f32, n, m]", "TW016: 'f32' is an element type, not the name of a size"),
        ("tensor[n <= 3, m]", "TW004: f: axis 0 of 'x' has 4 element(s), but its type says n <= 3"),
        ("tensor[1 <= n <= 3, m]", "TW004: f: axis 0 of 'x' has 4 element(s), but its type says 1 <= n <= 3"),
        ("tensor[n <= m, m]", "TW016: bounds of an extent are of one name"),
        ("tensor[n, 2 * n]", "TW004: size mismatch: axis 1 of 'x' is 4, but its counterpart is 8"),
        ("tensor[2.5, n]", "TW016: an extent is a whole number, not 2.5"),
        ("tensor[n, 1:3]", "TW016: a type has extents, not ranges"),
        ('tensor[n, m] @ "cuda:0"', "TW016: a type does not say where an array is"),
        ('tensor[n, m, "cuda:0"]', "TW016: a type does not say where an array is"),
        ("q4_0[n, m]", "TW009: f's 'x' must be q4_0, got f32"),
    ],
)
def test_types_that_are_none_or_do_not_hold(type_: str, message: str) -> None:
    assert wrong(DOUBLE.format(type=type_), x=X).startswith(message)


@pytest.mark.parametrize("type_", ["tensor[4, 4, f32]", "tensor[1 <= n <= 4, m]", "f32[n, 2 * n - 4]", "tensor[n, :]", "tensor[n, m]"])
def test_types_that_hold(type_: str) -> None:
    assert tw.load(DOUBLE.format(type=type_)).run(x=X)["y"].tolist() == (2 * X).tolist()


def test_types_of_lets() -> None:
    assert wrong("let y: tensor[n] * 3 = x", x=X).startswith("TW016: this is no type")
    assert wrong("let y: tensor[n <= 3, m] = x", x=X).startswith("TW004: let: axis 0 of 'y' has 4 element(s), but its type says n <= 3")
    assert wrong("let y = zeros(4, dtype=q8_0)").startswith("TW005: 'q8_0' holds packed blocks, which are made from an array by tw.quantize")


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("@foo", "TW011: unknown attribute '@foo' (known attributes: @device, @device_function)"),
        ('@devce("cpu")', "TW011: unknown attribute '@devce' (did you mean 'device'?)"),
        ("@tile(4)", "TW012: @tile says nothing about a function (write it on a compute block; @tile(m, n, k)"),
        ("@kernel matmul", "TW012: @kernel says nothing about a function"),
        ("@critical_path", "TW005: @critical_path is not available: latency-critical code is written as a Python function under @tw.critical, with the marks @tw.no_allocation and @tw.no_syscalls (remove @critical_path)"),
        ('@device("nowhere")', "TW030: unknown device 'nowhere'"),
        ('@device("cpu") @device("cpu")', "TW012: @device is given twice"),
    ],
)
@pytest.mark.parametrize("word", ["pipeline", "fn"])
def test_attributes_of_functions(attribute: str, message: str, word: str) -> None:
    assert wrong(f"{attribute}\n{DOUBLE.format(type='tensor').replace('pipeline', word)}", x=X).startswith(message)


def test_a_function_runs_where_it_says() -> None:
    text = '@device("{0}")\npipeline f(x):\n    let d = x * 2\n    return compute(d) {{ for i in 0..n, j in 0..m: out[i, j] = d[i, j] + 1 }}\nlet y = f(x)\n'
    seen: list[str] = []
    for device in ("cpu", "emulator"):
        with tw.profile() as profile:
            assert tw.load(text.format(device)).run(x=X, device="cpu")["y"].tolist() == (2 * X + 1).tolist()
        seen.append(str(profile))
    assert "emulator" in seen[1]
    assert "emulator" not in seen[0]


def test_a_device_function_can_stand_in_kernels() -> None:
    text = "@device_function\nfn twice(v):\n{0}    return v * 2\nlet y = compute(x) {{ for i in 0..n, j in 0..m: out[i, j] = twice(x[i, j]) }}\n"
    assert tw.load(text.format("")).run(x=X)["y"].tolist() == (2 * X).tolist()
    assert wrong(text.format("    print(v)\n"), x=X).startswith("TW012: @device_function, but 'twice' cannot stand in kernels")
    assert wrong("let y = compute(x) @device_function { for i in 0..n, j in 0..m: out[i, j] = x[i, j] }", x=X).startswith(
        "TW012: @device_function says nothing about a compute block (write it before fn or pipeline"
    )


def test_a_block_for_gpus_refuses_a_cpu() -> None:
    program = tw.load("let y = compute(x) @gpu_compute { for i in 0..n, j in 0..m: out[i, j] = x[i, j] * 2 }")
    assert program.run(x=X, device="emulator")["y"].tolist() == (2 * X).tolist()
    with pytest.raises(tw.DeviceError, match="y is marked @gpu_compute, and would run on 'cpu'"):
        program.run(x=X, device="cpu")


def test_vectorizable_is_a_promise() -> None:
    ok = "let y = compute(x) @vectorizable { for i in 0..n, j in 0..m: out[i, j] = x[i, j] * 2 }"
    assert tw.load(ok).run(x=X)["y"].tolist() == (2 * X).tolist()
    summed = "let y = compute(x) @vectorizable {\n for i in 0..n:\n  var s = 0.0\n  for j in 0..m: s += x[i, j]\n  out[i] = s\n}"
    assert wrong(summed, x=X).startswith("TW012:")
    shared = "let y = compute(x) @vectorizable {\n for i in 0..n:\n  shared var t[m]\n  for j in 0..m: t[j] = x[i, j]\n  barrier()\n  for j in 0..m: out[i, j] = t[j]\n}"
    assert wrong(shared, x=X).startswith("TW012: @vectorizable, but iterations share memory here")


@pytest.mark.parametrize("attribute", ["@no_allocation", "@no_syscalls", "@inline_always", "@cpu_affinity(1)", "@critical_path(target_latency_ns=100)"])
def test_promises_nobody_keeps_are_refused(attribute: str) -> None:
    name = attribute.partition("(")[0]
    assert wrong(f"let y = compute(x) {attribute} {{ for i in 0..n, j in 0..m: out[i, j] = x[i, j] }}", x=X).startswith(f"TW005: {name} is not available")


def test_words_of_other_languages_and_slips() -> None:
    assert wrong("let total = reduce(+, x)\nlet mean = totl / 3", x=X).startswith("TW008: missing input 'totl' (did you mean 'total'?")
    assert wrong("var s = 0\nbreak\n").startswith("TW005: 'break' outside a loop")
    assert wrong("let y = compute(x) {\n for i in 0..n:\n  continue\n  out[i] = 1.0\n}", x=X).startswith("TW005: this is never reached")
