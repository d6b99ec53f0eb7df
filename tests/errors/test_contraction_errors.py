"""Exact texts of what is said about contractions: kinds that are none, attributes that bind, schedules that do not fit, sizes under guards."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

import tilewright as tw
from gallery_cases import CONTRACTION_CASES
from tilewright.zyn.module import ZynModule

BY_NAME = {case.name: case.kernel for case in CONTRACTION_CASES}
MATMUL, CONV2D = BY_NAME["matmul"], BY_NAME["conv2d"]
SINGLE = np.ones((64, 64), np.float32)
HALF = np.ones((64, 64), np.float16)


def message(call: Callable[[], object], kind: type[tw.TilewrightError] = tw.UserError) -> str:
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind or (kind in type(caught.value).__bases__ and isinstance(caught.value, TypeError | ValueError | IndexError))
    assert isinstance(caught.value, tw.TargetLimit) == issubclass(kind, tw.TargetLimit)
    return re.sub(r"^\S*/(?=gallery\.py)", "", str(caught.value))


def program(attributes: str, term: str) -> ZynModule:
    return tw.load(
        f"let r = compute(a, b) {{\n    {attributes}\n    for i in 0..m, j in 0..n:\n        var total = 0.0\n"
        f"        for k in 0..depth:\n            total += {term}\n        out[i, j] = total\n}}\n"
    )


def scheduled(text: str) -> tw.Kernel:
    return tw.kernel(schedule=text)(MATMUL.python)


# -- kinds --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["matmul", "batched_matmul", "conv2d"])
@pytest.mark.parametrize("device", ["cpu", "emulator:thread"])
def test_a_kind_the_loops_are_not(kind: str, device: str) -> None:
    text = message(lambda: program(f"@kernel {kind}", "a[i, k] + b[k, j]").run(a=SINGLE, b=SINGLE, device=device))
    head, *excerpt, _ = text.splitlines()
    assert head == (
        f"<string>:1:9: error[TW012]: @kernel {kind}, but the loops are no such thing: nothing adds up products of two factors, one that varies "
        "along some results and one along others"
    )
    assert excerpt == ["   |", " 1 | let r = compute(a, b) {", "   |         ^^^^^^^^^^^^^^^"]


def test_a_matrix_times_a_vector_is_no_matmul() -> None:
    text = "let r = compute(a, b) {\n    @kernel matmul\n    for i in 0..m:\n        var total = 0.0\n        for k in 0..depth:\n"
    text += "            total += a[i, k] * b[k]\n        out[i] = total\n}\n"
    assert "error[TW012]: @kernel matmul, but the loops are no such thing" in message(lambda: tw.load(text).run(a=SINGLE, b=SINGLE[0]))
    assert tw.load(text.replace("matmul", "custom")).run(a=SINGLE, b=SINGLE[0])["r"].tolist() == [64.0] * 64


# -- attributes that bind -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wish", "shown"),
    [("@tile(128, 100)", "@tile(128, 100)"), ("@tile(m=100)", "@tile(m=100)"), ("@workgroup(7)", "@workgroup(7, 1, 1)"), ("@shared(1024)", "@shared(1024)")],
)
def test_strict_refuses_what_no_schedule_has(wish: str, shown: str) -> None:
    product = "a[i, k] * b[k, j]"
    text = message(lambda: program(f"@kernel matmul {wish} @strict", product).run(a=HALF, b=HALF, device="emulator"), tw.TargetLimit)
    head, *excerpt, help = text.splitlines()
    assert head == f"<string>:3:5: error[TW020]: no schedule for sm_90a has {shown}"
    assert excerpt == ["   |", " 3 |     for i in 0..m, j in 0..n:", "   |     ^^^^^^^^^^^^^^^^^^^^^^^^^"]
    assert re.fullmatch(r"help: tiles are (\d+x\d+, )+\d+x\d+, threads (\d+, )*\d+; without @strict the best one is taken", help)
    wanted = program(f"@kernel matmul {wish}", product).run(a=HALF, b=HALF, device="emulator")
    assert np.array_equal(wanted["r"], 64 * HALF)


@pytest.mark.parametrize(("wish", "shown"), [("@tile(m=100)", "@tile(m=100)"), ("@tile(block_q=64)", "@tile(block_q=64)"), ("@workgroup(7)", "@workgroup(7, 1, 1)")])
def test_strict_holds_on_a_cpu_too(wish: str, shown: str) -> None:
    product = "a[i, k] * b[k, j]"
    text = message(lambda: program(f"@kernel matmul {wish} @strict", product).run(a=SINGLE, b=SINGLE, device="cpu"), tw.TargetLimit)
    assert re.match(rf"<string>:3:5: error\[TW020\]: no schedule for \S+ has {re.escape(shown)}$", text.splitlines()[0])
    assert np.array_equal(program(f"@kernel matmul {wish}", product).run(a=SINGLE, b=SINGLE, device="cpu")["r"], 64 * SINGLE)


def test_a_precision_that_is_none() -> None:
    assert message(lambda: program("@precision(tf33)", "a[i, k] * b[k, j]").run(a=HALF, b=HALF)).splitlines() == [
        "<string>:2:5: error[TW016]: @precision takes one of auto, ieee, tf32, 3xtf32", "   |", " 2 |     @precision(tf33)", "   |     ^^^^^^^^^^^^^^^^",
        'help: write @precision(tf32), or @precision("3xtf32")',
    ]  # fmt: skip
    assert message(lambda: tw.kernel(precision="half")(MATMUL.python)) == (
        "error[TW016]: precision is 'half'\nhelp: choose one of auto, ieee, tf32, 3xtf32"
    )


# -- schedules ------------------------------------------------------------------------------------------------------------


def pointing(error: str, line: int) -> list[str]:
    return [f"gallery.py:{line}:5: {error}", "     |", f" {line} |     for i, j in tw.grid(m, n):", "     |     ^^^^^^^^^^^^^^^^^^^^^^^^^^"]


def test_a_family_the_target_has_not() -> None:
    schedule = "family=wgmma m=128 n=128 k=64"
    line = MATMUL.python.__code__.co_firstlineno + 5
    for target, known in (("sm_80", "mma"), ("x86-64-avx2", "cpu")):
        *lines, help = message(lambda target=target: scheduled(schedule).compile(HALF, HALF, target=target)).splitlines()
        assert lines == pointing(f"error[TW020]: schedule '{schedule}': matmul cannot be computed with family=wgmma here", line)
        assert help == f"help: it can with {known}"


def test_a_tile_no_instruction_has() -> None:
    schedule = "family=wgmma m=100 n=64 k=64"
    line = MATMUL.python.__code__.co_firstlineno + 5
    *lines, help = message(lambda: scheduled(schedule).compile(HALF, HALF, target="sm_90a")).splitlines()
    assert lines == pointing(f"error[TW020]: schedule '{schedule}' does not fit matmul", line)
    assert help.startswith("help: a tile has m % 64 == 0, n % 8 == 0 up to 256, k of 128 bytes")


def test_a_text_that_is_no_schedule() -> None:
    assert message(lambda: scheduled("family=wgmma")(HALF, HALF)) == "error[TW005]: a schedule needs m, n, k"
    assert message(lambda: scheduled("family=cpu m=1 n=many k=1")(HALF, HALF)) == "error[TW005]: 'n=many': n is an integer"
    assert message(lambda: scheduled("speed=9")(HALF, HALF)) == "error[TW005]: a schedule needs family, m, n, k"
    unknown = message(lambda: scheduled("family=cpu m=1 n=1 k=1 speed=9")(HALF, HALF))
    assert "error[TW005]: 'speed=9' is not part of a schedule of family cpu\nhelp: names are m, n, k, mr, nr" in unknown


# -- sizes under guards -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "emulator:thread", "emulator:loop"])
def test_loops_that_do_not_fit_what_is_read_under_a_guard(device: str) -> None:
    image, windows = np.ones((1, 6, 6, 8), np.float32), np.ones((4, 3, 3, 4), np.float32)
    head = message(lambda: CONV2D(image, windows, device=device)).splitlines()[0]
    line = CONV2D.python.__code__.co_firstlineno
    # The emulator's code is made for sizes that are known numbers.
    wanted = "'channels' is 8 (axis 3 of 'x')" if device == "cpu" else "must be 8"
    assert head.endswith(f"gallery.py:{line + 1}:1: error[TW004]: size mismatch: axis 3 of 'w' is 4, but {wanted}"), head
