from __future__ import annotations

import pytest

from tilewright.base.errors import Diagnostics
from tilewright.frontend.zyn import parse_module
from tilewright.tree import syntax
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


def test_devices_and_constraints() -> None:
    metadata, errors = read('@device(["cuda:0", "cpu"])\n@parallel(data)\n@critical_path\n@kernel my_own\n@broadcast(v, axis=1)')
    assert not errors
    assert metadata.device == DeviceTarget(("cuda:0", "cpu"))
    assert metadata.parallel == "data"
    assert metadata.label == "my_own"
    assert metadata.broadcast == (("v", 1),)
    assert metadata.constraints.no_allocation
    assert metadata.constraints.no_syscalls
    assert metadata.compile_target is CompileTarget.CPU


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
        ("@tile(block=n)", "TW016: @tile must be a constant integer"),
    ],
)
def test_errors(attributes: str, error: str) -> None:
    assert read(attributes)[1] == [error]
