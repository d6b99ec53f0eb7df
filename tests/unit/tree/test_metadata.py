from __future__ import annotations

import pytest

from tilewright.base.errors import Diagnostics
from tilewright.frontend.zyn.parse import parse_module
from tilewright.tree import syntax
from tilewright.tree.kernel_words import ATTRIBUTES, BLOCK, REFUSED
from tilewright.tree.metadata import CompileTarget, DeviceTarget, KernelKind, KernelMetadata, read_attributes


def read(attributes: str) -> tuple[KernelMetadata, list[str]]:
    text = "let r = compute(x) {\n" + "".join(f"    {line}\n" for line in attributes.split("\n")) + "    out = x\n}\n"
    statement = parse_module(text).body[0]
    assert isinstance(statement, syntax.Let)
    assert isinstance(statement.value, syntax.Compute)
    sink = Diagnostics()
    metadata = read_attributes(statement.value.attributes, sink)
    return metadata, [f"{d.code}: {d.message}" for d in sink.errors]


def test_nothing_given() -> None:
    metadata, errors = read("")
    assert metadata == KernelMetadata()
    assert not errors
    assert metadata.compile_target is CompileTarget.HETEROGENEOUS
    assert metadata.lines() == ["@kernel custom"]


def test_reduction_with_axes() -> None:
    metadata, errors = read("@kernel reduce(max, axis=(0, -1))")
    assert not errors
    assert (metadata.kind, metadata.reduction, metadata.axes) == (KernelKind.REDUCE, "max", (0, -1))
    assert metadata.lines() == ["@kernel reduce(max, axis=[0, -1])"]


def test_schedule_attributes() -> None:
    metadata, errors = read(
        '@kernel conv2d(stride=2)\n@workgroup(16, 8)\n@shared(16 * 16 * 4)\n@tile(block_q=64, block_kv=32)\n@device("cuda:0")'
    )
    assert not errors
    assert metadata.params == (("stride", 2),)
    assert metadata.workgroup_size == (16, 8, 1)
    assert metadata.shared_memory_bytes == 1024
    assert metadata.hints.tile == (("block_q", 64), ("block_kv", 32))
    assert metadata.compile_target is CompileTarget.GPU
    assert metadata.lines() == [
        "@kernel conv2d(stride=2)", "@device(cuda:0)", "@workgroup(16, 8, 1)", "@shared(1024)", "@tile(block_q=64, block_kv=32)",
    ]  # fmt: skip


def test_devices_and_own_kinds() -> None:
    metadata, errors = read('@device(["cuda:0", "cpu"])\n@parallel(data)\n@unchecked\n@kernel my_own(depth=3)\n@broadcast(v, axis=1)')
    assert not errors
    assert metadata.device == DeviceTarget(("cuda:0", "cpu"))
    assert metadata.parallel == "data"
    assert (metadata.label, metadata.params) == ("my_own", (("depth", 3),))
    assert metadata.broadcast == (("v", 1),)
    assert metadata.unchecked


def test_every_attribute_is_read_or_refused() -> None:
    """No attribute of the table is taken without a word: it changes the record, or is an error."""
    forms = {
        "kernel": "@kernel elementwise", "device": '@device("cpu")', "workgroup": "@workgroup(64)", "shared": "@shared(64)", "tile": "@tile(4)",
        "broadcast": "@broadcast(x, axis=0)", "parallel": "@parallel(data)", "precision": "@precision(tf32)", "max_registers": "@max_registers(64)",
        "vector": "@vector(4)", "unroll": "@unroll(2)", "cpu_affinity": "@cpu_affinity(1)", "activations": "@activations(q8)", "optimize": "@optimize(O1)",
    }  # fmt: skip
    for word in ATTRIBUTES:
        metadata, errors = read(forms.get(word.name, f"@{word.name}"))
        if word.fate == REFUSED:
            assert errors == [f"TW005: @{word.name} is not available: {word.reason}"]
        elif BLOCK not in word.places:
            assert errors == [f"TW012: @{word.name} says nothing about a compute block"]
        else:
            assert not errors
            assert metadata != KernelMetadata()
            assert any(f"@{word.name}" in line for line in metadata.lines()) or word.name in ("broadcast", "parallel")


@pytest.mark.parametrize(
    ("attributes", "error"),
    [
        ("@kernal elementwise", "TW011: unknown attribute '@kernal'"),
        ("@kernel matmull", "TW011: unknown kernel kind 'matmull'"),
        ("@workgroup(0)", "TW016: @workgroup takes one to three positive integers, got [0]"),
        ("@workgroup(1, 2, 3, 4)", "TW016: @workgroup takes one to three positive integers, got [1, 2, 3, 4]"),
        ("@kernel reduce(median)", "TW016: unknown reduction 'median'"),
        ("@kernel reduce(+, over=1)", "TW016: @kernel reduce has no parameter 'over'"),
        ("@device(3)", 'TW016: @device takes device names such as "cpu" or "cuda:0"'),
        ("@parallel(rows)", "TW016: @parallel takes data or model"),
        ("@tile(m=n)", "TW016: @tile must be a constant integer"),
        ("@tile(blok_q=4)", "TW016: @tile has no 'blok_q'"),
        ("@tile(4, m=4)", "TW016: @tile takes extents in order, or each by its name once"),
        ("@tile(0)", "TW016: @tile takes positive integers, got 0"),
        ("@vector(0)", "TW016: @vector takes a whole number from 1 to 64, got 0"),
        ("@max_registers(400)", "TW016: @max_registers takes a whole number from 16 to 255, got 400"),
        ("@kernel conv2d(strde=2)", "TW016: @kernel conv2d has no parameter 'strde'"),
        ("@kernel conv2d(stride=0)", "TW016: 'stride' of @kernel conv2d is 0, and must be a whole number from 1 on"),
        ("@kernel conv2d(padding=-1)", "TW016: 'padding' of @kernel conv2d is -1, and must be a whole number from 0 on"),
        ("@kernel conv2d(stride=1.5)", "TW016: 'stride' of @kernel conv2d is 1.5, and must be a whole number from 1 on"),
        ("@kernel conv2d(groups=true)", "TW016: 'groups' of @kernel conv2d is true, and must be a whole number from 1 on"),
        ("@kernel conv2d(2)", "TW016: @kernel conv2d takes its parameters by name"),
        ("@kernel conv2d(stride=2, stride=3)", "TW016: @kernel conv2d gets 'stride' twice"),
        ("@kernel elementwise(foo=3)", "TW016: @kernel elementwise has no parameter 'foo'"),
        ("@kernel matmul(m=3)", "TW016: @kernel matmul has no parameter 'm'"),
        ("@kernel sort(descending=1)", "TW016: 'descending' of @kernel sort is 1, and must be true or false"),
        ("@kernel histogram(bins=0)", "TW016: 'bins' of @kernel histogram is 0, and must be a whole number from 1 on"),
        ("@kernel scan", "TW016: @kernel scan takes one operation, got 0"),
        ("@kernel scan(median)", "TW016: unknown reduction 'median'"),
    ],
)
def test_errors(attributes: str, error: str) -> None:
    assert read(attributes)[1] == [error]
