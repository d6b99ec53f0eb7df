"""Every program text of the language's design document stands in an example, line by line, but for what is listed here with its
reason.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tour_cases import load_tours

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples/zyn"

DEVICES = "a test must find the device"
NAMED_ONCE = "one program has one name for each result"
INPUT = "the document leaves out the second factor"
CHANGED = {
    "rope": {
        "let rotated = compute(x, cos_cache, sin_cache) {": ("let rotated = compute(heads_in, cos_cache, sin_cache) {", NAMED_ONCE),
        "let x0 = x[b, h, s, d * 2]": ("let x0 = heads_in[b, h, s, d * 2]", NAMED_ONCE),
        "let x1 = x[b, h, s, d * 2 + 1]": ("let x1 = heads_in[b, h, s, d * 2 + 1]", NAMED_ONCE),
        "let s = sin_cache[s, d]": ("let sine = sin_cache[s, d]", "s is the index of a loop"),
        "out[b, h, s, d * 2] = x0 * c - x1 * s": ("out[b, h, s, d * 2] = x0 * c - x1 * sine", "s is the index of a loop"),
        "out[b, h, s, d * 2 + 1] = x0 * s + x1 * c": ("out[b, h, s, d * 2 + 1] = x0 * sine + x1 * c", "s is the index of a loop"),
    },
    "batched matmul": {
        "let C = compute(A, B) {": ("let batched = compute(P, Q) {", NAMED_ONCE),
        "sum += A[b, i, k] * B[b, k, j]": ("sum += P[b, i, k] * Q[b, k, j]", NAMED_ONCE),
    },
    "conv2d": {"@kernel conv2d": ("@kernel conv2d(stride=2, padding=1)", "nothing else says what stride and padding are")},
    "depthwise": {
        "let output = compute(input, kernel) {": ("let filtered = compute(input, windows) {", NAMED_ONCE),
        "sum += input[b, c, oh + kh, ow + kw] * kernel[c, kh, kw]": ("sum += input[b, c, oh + kh, ow + kw] * windows[c, kh, kw]", NAMED_ONCE),
    },
    "flash attention": {"let attn = compute(Q, K, V) {": ("let flash = compute(Q, K, V) {", NAMED_ONCE)},
    "default device": {'compute_device: "cuda:0"': ('compute_device: "auto"', DEVICES)},
    "on a gpu": {'let gpu_result = compute(data) @device("cuda:0") {': ('let gpu_result = compute(data, weights) @device(["cuda:0", "cpu"]) {', DEVICES)},
    "on the cpu": {'let cpu_result = compute(data) @device("cpu") {': ('let cpu_result = compute(data, weights) @device("cpu") {', INPUT)},
    "on the best device": {'let result = compute(data) @device("auto") {': ('let result = compute(data, weights) @device("auto") {', INPUT)},
    "data parallel": {
        'let result = compute(large_data) @device(["cuda:0", "cuda:1"]) @parallel(data) {': (
            'let result = compute(large_data, weights) @device(["cpu:0/2", "cpu:1/2"]) @parallel(data) {', DEVICES,
        ),
    },
    "model parallel": {
        'let result = compute(data) @device(["cuda:0", "cuda:1"]) @parallel(model) {': (
            'let forward = compute(data, weights, more_weights) @device(["cpu:0/2", "cpu:1/2"]) @parallel(model) {', DEVICES,
        ),
    },
    "synchronous": {"let result = compute(data) {": ("let result_now = compute(data) {", NAMED_ONCE)},
    "work meanwhile": {"let cpu_work = process_metadata()": ("let cpu_work = process_metadata(data)", "it is a function of the program, with something to do")},
    "several futures": {f"compute(batch{n}) @async {{ ... }},": (f"compute(batch{n}) @async {{", "the bodies are filled in") for n in (1, 2, 3)},
    "await any": {"let (result, index) = await any(futures)": ("let (first, index) = await any(futures)", NAMED_ONCE)},
    "timeout": {
        "let result = await future timeout 1000ms else default_value": ("let in_time = await future timeout 1000ms else default_value", NAMED_ONCE),
    },
    "allocate": {
        'let gpu_tensor = allocate(shape=[1024, 1024], dtype=float32, device="cuda:0")': (
            "let gpu_tensor = allocate(shape=[1024, 1024], dtype=float32, device=place)", DEVICES,
        ),
    },
    "to a device": {'let gpu_data = data.to_device("cuda:0")': ("let gpu_data = data.to_device(place)", DEVICES)},
    "back": {'let cpu_data = gpu_data.to_device("cpu")': ('let cpu_data = doubled.to_device("cpu")', "so that something was computed there")},
    "zero copy": {'let gpu_view = data.to_device("cuda:0", copy=false)': ("let gpu_view = data.to_device(place, copy=false)", DEVICES)},
    "pool": {'let pool = memory_pool(device="cuda:0", size=1GB)': ("let pool = memory_pool(device=place, size=64MB)", DEVICES)},
    "transformer block": {
        "let attn_out = reshape(attn_out, [batch, seq, hidden])": (
            "let attn_out = reshape(transpose(attn_out, [0, 2, 1, 3]), [batch, seq, hidden])", "heads are outside positions",
        ),
        "@shared(batch * seq * ffn_hidden * 4)": ("@shared(ffn_hidden * 4)", "a block has memory for one row, not for all"),
    },
}  # fmt: skip
"""By snippet and line of the document: the line of the example, and why it differs."""


def snippets() -> dict[str, tuple[str, list[str]]]:
    """By title: the example and the lines."""
    found: dict[str, tuple[str, list[str]]] = {}
    for part in (ROOT / "tests/data/language_document.txt").read_text(encoding="utf-8").split("## ")[1:]:
        head, *lines = part.strip().split("\n")
        title, example = head.split(" -> ")
        found[title] = example, lines
    return found


SNIPPETS = snippets()


def test_there_are_forty() -> None:
    assert len(SNIPPETS) == 40
    assert set(CHANGED) <= set(SNIPPETS)
    assert all(line in SNIPPETS[title][1] for title, lines in CHANGED.items() for line in lines)


@pytest.mark.parametrize("title", SNIPPETS)
def test_a_program_of_the_document_stands_in_its_example(title: str) -> None:
    example, lines = SNIPPETS[title]
    written = [re.split(r"\s*//", line)[0].strip() for line in (EXAMPLES / example).read_text(encoding="utf-8").split("\n")]
    changed = CHANGED.get(title, {})
    place = 0
    for line in lines:
        wanted = changed[line][0] if line in changed else line
        assert wanted in written[place:], f"{example} has no line '{wanted}' after line {place}"
        place = written.index(wanted, place) + 1


def test_every_example_of_the_document_is_run() -> None:
    """`test_zyn_examples.py` runs the tours and compares their results."""
    assert {example for example, _ in SNIPPETS.values()} == {tour.path.name for tour in load_tours()}
