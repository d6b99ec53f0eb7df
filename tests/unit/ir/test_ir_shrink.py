"""The reducer finds the planted failure and leaves little else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tilewright.base.dtypes import f32
from tilewright.base.errors import UserError
from tilewright.base.sizes import Size
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Stage, Value, walk
from tilewright.ir.shrink import main, shrink_kernel
from tilewright.ir.text import print_kernel
from tilewright.ir.text_parse import parse_kernel
from tilewright.ir.types import Tile, tensor
from tilewright.ir.verify import verify_kernel

FILES = Path(__file__).parents[2] / "filetests"


def opcodes(kernel: Kernel) -> list[str]:
    return [op.opcode for op in walk(kernel.body)]


def long_kernel(count: int) -> Kernel:
    m = Value(tensor(f32, "rows", "cols"), "m")
    unused = Value(tensor(f32, "rows"), "unused")
    builder = Builder()
    rows, cols = builder.index(Size.of("rows")), builder.index(Size.of("cols"))

    def body(b: Builder, i: Value, j: Value) -> list[Value]:
        value = b.op("load", m, i, j)
        for k in range(count):
            value = b.op("sin", value) if k == count // 3 else b.mul(value, b.const(float(k), f32))
        condition = b.op("gt", value, b.const(0.0, f32))
        (value,) = b.if_(condition, lambda b: [b.op("exp", value)], lambda b: [b.op("cos", value)])
        b.multi("store", m, i, j, value)
        return []

    builder.parallel([rows, cols], body)
    return Kernel("long", Stage.LOOP, (m, unused), Block((), tuple(builder.ops)))


def test_planted_op_is_what_remains() -> None:
    calls = 0

    def still_fails(kernel: Kernel) -> bool:
        nonlocal calls
        calls += 1
        verify_kernel(kernel)
        return "sin" in opcodes(kernel) and "store" in opcodes(kernel)

    small = shrink_kernel(long_kernel(200), still_fails)
    found = [opcode for opcode in opcodes(small) if opcode not in ("const", "yield")]
    assert found == ["parallel", "sin", "store"]
    assert [p.name for p in small.params] == ["m"]
    assert calls < 100


def test_dependence_is_kept() -> None:
    """The failure needs `exp` of something that comes from `sin`: neither alone will do."""

    def still_fails(kernel: Kernel) -> bool:
        tainted: set[Value] = set()
        for op in walk(kernel.body):
            if op.opcode == "exp" and op.operands[0] in tainted:
                return True
            if op.opcode == "sin" or any(o in tainted for o in op.operands):
                tainted.update(op.results)
        return False

    small = shrink_kernel(long_kernel(40), still_fails)
    assert [opcode for opcode in opcodes(small) if opcode not in ("const", "yield")] == ["parallel", "sin", "exp"]


def test_loops_are_unwrapped_and_tiles_shrink() -> None:
    kernel = parse_kernel((FILES / "tile_matmul.kir").read_text())
    small = shrink_kernel(kernel, lambda k: "dot" in opcodes(k))
    verify_kernel(small)
    assert set(opcodes(small)) == {"const", "broadcast", "dot"}
    assert small.params == ()
    assert (small.grid, small.threads, dict(small.facts)) == ((Size.of(1),), 1, {})
    assert all(r.type.shape == (1, 1) for op in walk(small.body) for r in op.results if isinstance(r.type, Tile))


def test_needed_tile_shape_stays() -> None:
    kernel = parse_kernel((FILES / "tile_matmul.kir").read_text())

    def still_fails(candidate: Kernel) -> bool:
        return any(isinstance(r.type, Tile) and 16 in r.type.shape for op in walk(candidate.body) for r in op.results)

    assert len(opcodes(shrink_kernel(kernel, still_fails))) == 1


def test_kernel_that_never_verified() -> None:
    text = "kernel @k stage=tile grid=[n] {\n  param %a: f32\n  %b = neg %a : f32\n  %0 = add %b, %b : bool\n  %c = neg %a : f32\n}"
    kernel = parse_kernel(text)
    small = shrink_kernel(
        kernel, lambda k: any(op.opcode == "add" and str(op.result.type) == "bool" for op in walk(k.body))
    )
    assert [opcode for opcode in opcodes(small) if opcode != "const"] == ["add"]


def test_nothing_to_shrink() -> None:
    with pytest.raises(UserError, match="kernel @long does not fail"):
        shrink_kernel(long_kernel(3), lambda kernel: False)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "big.kir"
    source.write_text(print_kernel(long_kernel(6)))
    script = tmp_path / "fails.py"
    script.write_text("import sys\nif 'sin' in open(sys.argv[1]).read():\n    print('boom')\n    sys.exit(3)\n")
    # -S -E: a bare interpreter starts fast, and the search runs it a few dozen times.
    command = f"{sys.executable} -S -E {script} {{}}"
    assert main([str(source), "--command", command, "--expect", "boom", "--output", str(tmp_path / "small.kir")]) == 0
    small = parse_kernel((tmp_path / "small.kir").read_text())
    assert [opcode for opcode in opcodes(small) if opcode not in ("const", "yield")] == ["parallel", "sin"]
    assert main([str(source), "--command", command, "--expect", "other"]) == 1
    assert "nothing to shrink" in capsys.readouterr().err
