"""Code of barriers of the grid: what PTX they become, and what LLVM may no longer assume of memory."""

from __future__ import annotations

import re

import pytest

from assembled import assemble
from tilewright.base.dtypes import f32
from tilewright.base.sizes import Size
from tilewright.base.target import parse_target
from tilewright.codegen.llvm.native import emit_assembly
from tilewright.codegen.nvptx.emitter import nvptx_function
from tilewright.codegen.nvptx.grid import is_cooperative
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Stage, Value
from tilewright.ir.types import tensor
from tilewright.ir.verify import verify_kernel


def handing_on(meets: bool = True, **attrs: int) -> Kernel:
    """Every block stores to x and adds what it then finds at the place of another block to y."""
    x, y = Value(tensor(f32, 4096), "x"), Value(tensor(f32, 4096), "y")
    b = Builder()
    own = b.add(b.mul(b.op("program_id", axis=0), b.index(128)), b.op("thread_id"))
    b.multi("store", x, own, b.const(1.0, f32))
    if meets:
        b.multi("grid_barrier")
    b.multi("store", y, own, b.op("load", x, own))
    kernel = Kernel("k", Stage.THREAD, (x, y), Block((), tuple(b.ops)), (Size.of(32),), 128, attrs=attrs)
    verify_kernel(kernel)
    return kernel


def ptx(kernel: Kernel, target: str = "sm_90a") -> str:
    chosen = parse_target(target)
    text, declarations, _ = nvptx_function(kernel, "tw_k", chosen)
    return emit_assembly("\n".join(sorted(declarations)) + "\n" + text, chosen)


def test_who_is_cooperative() -> None:
    assert is_cooperative(handing_on())
    assert not is_cooperative(handing_on(meets=False))


def test_arrival_releases_and_waiting_acquires() -> None:
    text = ptx(handing_on())
    order = [text.index(part) for part in ("st.global", "bar.sync", "atom.add.release.gpu.u32", "ld.acquire.gpu.u32")]
    assert order == sorted(order)
    assert text.index("bar.sync", order[-1]) < text.index("ld.global", order[-1])
    assert "%envreg1" in text and "%envreg2" in text


def test_what_was_stored_before_is_loaded_again() -> None:
    """Without the barrier LLVM passes the value on; with it another block may have written there."""
    assert not re.search(r"ld\.global", ptx(handing_on(meets=False)))
    assert re.search(r"ld\.global", ptx(handing_on()))


def test_the_watchdog_watches_the_wait() -> None:
    assert "globaltimer" in ptx(handing_on(watchdog=1_000_000))
    assert "globaltimer" not in ptx(handing_on())


@pytest.mark.requires("ptxas")
@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_90a", "sm_100", "sm_120"])
def test_it_assembles(target: str) -> None:
    assemble(ptx(handing_on(), target), target)
