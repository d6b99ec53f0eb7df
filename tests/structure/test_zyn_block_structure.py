"""What the transformer block's text becomes on Hopper: one program, as many launches as the block written by hand, matrix instructions in each product."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from assembled import assemble
from tilewright.base.dtypes import bf16
from tilewright.base.target import parse_target
from tilewright.compile.driver import Compilation, Signature, compile_kernel, compile_stages
from tilewright.execute.calls.run import Runner
from tilewright.passes.schedules.matrix import MatrixSchedule
from tilewright.tree.syntax import Function
from tilewright.zyn import module
from tilewright.zyn.host.block_runner import BlockRunner

BLOCK = Path(__file__).parents[2] / "examples" / "zyn" / "transformer_block.zyn"
BATCH, SEQ, HEADS, DEPTH, INNER = 8, 512, 12, 64, 3072


class Looking(BlockRunner):
    """Compiles for Hopper and runs nothing."""

    takes_futures = joins_blocks = True

    def __init__(self) -> None:
        self.seen: list[tuple[Function, Signature]] = []

    def __call__(self, function: Function, arguments: dict[str, object], device: str) -> object:
        runner = Runner(function)
        self.seen.append((function, runner.signature(runner.arguments(arguments, True), True)))
        return np.zeros((BATCH, SEQ, HEADS * DEPTH), bf16.numpy)


@pytest.fixture(scope="module")
def block() -> tuple[Function, Signature]:
    hidden = HEADS * DEPTH
    shapes = {
        "qkv_proj": (hidden, 3 * hidden), "out_proj": (hidden, hidden), "ln1_weight": (hidden,), "ln1_bias": (hidden,),
        "ffn_up": (hidden, INNER), "ffn_down": (INNER, hidden), "ln2_weight": (hidden,), "ln2_bias": (hidden,),
    }  # fmt: skip
    weights = {name: np.zeros(shape, bf16.numpy) for name, shape in shapes.items()}
    looking = Looking()
    x = np.zeros((BATCH, SEQ, hidden), bf16.numpy)
    module.load(BLOCK, looking).transformer_block(x, 0, model={"layers": [weights]}, num_heads=HEADS, head_dim=DEPTH)
    (only,) = looking.seen
    return only


@pytest.fixture(scope="module")
def done(block: tuple[Function, Signature]) -> Compilation:
    return compile_stages(*block, parse_target("sm_90a"))


def test_seven_launches(done: Compilation) -> None:
    calls = done.stages.thread.calls
    names = ["qkv", "attn_out", "projected", "normed", "ffn_out_0", "ffn_out_1", "output"]
    assert [call.kernel.name for call in calls] == names
    families = [s.family if isinstance(s, MatrixSchedule) else "" for s in done.stages.schedules]
    assert families == ["wgmma", "attention", "wgmma", "", "wgmma", "wgmma", ""]


def test_schedules_are_those_of_products_of_plain_matrices(done: Compilation) -> None:
    product = "family=wgmma m=128 n=192 k=64 stages=4 math_warpgroups=2 pingpong=1 mma_in_flight=1 epilogue_stages=3 pdl=1"
    assert [s.describe() for s in done.stages.schedules if isinstance(s, MatrixSchedule) and s.family == "wgmma"] == [
        product
    ] * 4
    rows = [s.describe() for s in done.stages.schedules if not isinstance(s, MatrixSchedule)]
    assert all("whole=True" in text for text in rows) and len(set(rows)) == 1  # a row stays in registers


def test_what_passes_between_kernels_is_narrow_and_lies_as_it_is_read(done: Compilation) -> None:
    between = {array.name: str(array.type) for array in done.stages.thread.scratch}
    assert set(between) == {"qkv", "attn_out", "projected", "normed", "up", "ffn_out"}
    assert all(text.startswith("tensor<bf16") for text in between.values())
    assert "[batch, seq, 768]" in between["attn_out"]


@pytest.mark.requires("ptxas")
def test_instructions(block: tuple[Function, Signature]) -> None:
    ptx = compile_kernel(*block, parse_target("sm_90a")).code.decode()
    entries = re.split(r"\.visible \.entry ", ptx)[1:]
    counts = [len(re.findall(r"wgmma\.mma_async", text)) for text in entries]
    assert len(entries) == 7 and [bool(count) for count in counts] == [True, True, True, False, True, True, False]
    made = assemble(ptx, "sm_90a")
    assert made.spills == 0 and not re.search(r"C75\d\d|serializ", made.log), made.log
