"""NVPTX code of explicit kernels' ops: every op, dtype, scope and order becomes PTX that the assembler takes, as what it says."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from assembled import assemble
from instruction_kernels import (
    Maker,
    atomic_orders,
    atomic_vectors,
    atomic_wide,
    atomics,
    failing,
    instruction_cases,
    message,
    printing,
    until,
)
from tilewright.base.dtypes import bf16, f32, i32, u32, u64
from tilewright.base.errors import TargetLimit, UserError
from tilewright.base.target import parse_target
from tilewright.codegen.llvm.native import emit_assembly
from tilewright.codegen.nvptx import simt
from tilewright.codegen.nvptx.emitter import SIMT, nvptx_function, ptx_needed
from tilewright.compile.build import build_artifact, llvm_text
from tilewright.compile.serial import deserialise, serialise
from tilewright.ir.nodes import Kernel, walk
from tilewright.ir.ops_simt import ATOMICS, DEFINITIONS, ORDERS
from tilewright.passes.late.check_target import check_kernel_target

KNOWN = set((Path(__file__).parents[2] / "data" / "llvm22_nvvm.txt").read_text().split())
CASES = {case.name: case for case in instruction_cases()}
SCOPES = {"block": "cta", "cluster": "cluster", "device": "gpu", "system": "sys"}


def llvm_of(kernel: Kernel, target: str) -> tuple[str, int]:
    """The text, and the PTX version it needs."""
    chosen = parse_target(target)
    chosen = replace(chosen, ptx=max(chosen.ptx, ptx_needed(kernel, chosen)))
    check_kernel_target(kernel, chosen)
    text, declarations, _ = nvptx_function(kernel, kernel.name, chosen)
    return "\n".join(sorted(declarations)) + "\n" + text, chosen.ptx


def ptx_of(kernel: Kernel, target: str = "sm_90a") -> str:
    text, version = llvm_of(kernel, target)
    return emit_assembly(text, replace(parse_target(target), ptx=version))


def test_every_op_has_a_case() -> None:
    seen = {op.opcode for case in CASES.values() for op in walk(case.kernel.body)}
    assert {row.name for row in DEFINITIONS} <= seen


@pytest.mark.requires("ptxas")
@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_90a", "sm_100", "sm_120"])
@pytest.mark.parametrize("name", CASES)
def test_every_case_assembles(name: str, target: str) -> None:
    case = CASES[name]
    if parse_target(target).sm < case.sm:
        with pytest.raises(TargetLimit, match=rf"error\[TW020\]: {target} cannot do \w+"):
            llvm_of(case.kernel, target)
        return
    text, version = llvm_of(case.kernel, target)
    used = set(re.findall(r"declare [^@]*@(llvm\.nvvm\.[\w.]+)\(", text))
    unknown = {n for n in used if not any(n == k or n.startswith(k + ".") for k in KNOWN)}
    assert not unknown, f"LLVM 22 does not know {sorted(unknown)}"
    ptx = emit_assembly(text, replace(parse_target(target), ptx=version), opt=1)
    called = set(re.findall(r"\.extern \.func [^\n]*?(\w+)\s*\n?\(", ptx))
    assert called <= {"vprintf"}, "a call of something that is not there"
    assemble(ptx, target, level=0)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", ATOMICS)
def test_scope_and_order_are_kept(kind: str, order: str, scope: str) -> None:
    """LLVM's own atomics would drop both."""
    m = Maker("one")
    memory = m.array("t", u32, CASES["atomics_u32"].arrays["v"])
    operands = [m.b.const(1, u32)] * (2 if kind == "cas" else 1)
    m.b.multi("atomic", memory, m.number, *operands, kind=kind, scope=scope, order=order)
    (line,) = (x.strip() for x in ptx_of(m.case().kernel).splitlines() if re.match(r"\s*(atom|red)\.", x))
    if order == "relaxed" and scope == "device" and kind != "cas":
        assert re.match(r"(atom|red)\.(relaxed\.gpu\.)?global\.", line), line
    else:
        assert line.startswith(f"atom.{order}.{SCOPES[scope]}.global."), line


@pytest.mark.parametrize("order", ["relaxed", "acquire", "volatile"])
def test_loads_that_wait_stay_in_their_loop(order: str) -> None:
    m = Maker("waiting")
    flags = m.array("flags", u32, CASES["atomics_u32"].arrays["v"])
    until(m.b, lambda b: b.op("eq", b.op("atomic_load", flags, m.number, order=order), b.const(1, u32)))
    ptx = ptx_of(m.case().kernel)
    word = "ld.volatile.global.b32" if order == "volatile" else f"ld.{order}.gpu.global.b32"
    body = ptx[ptx.index("$L") :]
    assert word in body
    assert "bra" in body[body.index(word) :]


def test_floats_without_an_instruction_are_loops() -> None:
    assert "atom.relaxed.gpu.global.cas.b32" in ptx_of(atomics(f32).kernel)
    on_ampere, on_hopper = (ptx_of(atomics(bf16).kernel, target) for target in ("sm_80", "sm_90a"))
    assert "add.noftz.bf16" in on_hopper
    assert "add.noftz.bf16" not in on_ampere


def test_those_who_fail_often_stay_away() -> None:
    """A loop around compare-and-swap sleeps, and looks again before the next attempt: without, very many threads would never get through."""
    ptx = ptx_of(atomics(u64).kernel)
    after = ptx[ptx.index("nanosleep.u32") :]
    assert after.index("ld.relaxed.gpu.global.b64") < after.index("bra")
    # Kinds that are one instruction have no loop.
    assert "nanosleep" not in ptx_of(atomic_orders("global", i32).kernel)


def test_neighbours_are_added_together_where_that_is_one_instruction() -> None:
    on_ampere, on_hopper = (ptx_of(atomic_vectors().kernel, target) for target in ("sm_80", "sm_90a"))
    for word in (
        "atom.relaxed.gpu.global.add.v4.f32",
        "atom.acq_rel.gpu.global.add.v8.noftz.bf16",
        "atom.relaxed.gpu.global.add.v2.noftz.f16",
    ):
        assert word in on_hopper
        assert word not in on_ampere
    assert ".version 8.1" in on_hopper


def test_accesses_of_128_bits_raise_the_ptx_version() -> None:
    artifact = build_artifact(message(2).program(), parse_target("sm_90a"))
    assert b".version 8.3" in artifact.code
    assert b"ld.relaxed.gpu.global.b128" in artifact.code
    assert b".version 8.0" in build_artifact(message(1).program(), parse_target("sm_90a")).code
    with pytest.raises(TargetLimit, match=r"sm_80 cannot do atomic exchange of 128 bits: that needs sm_90"):
        llvm_of(atomic_wide("global").kernel, "sm_80")


def test_what_others_write_is_read_again_after_a_barrier() -> None:
    """Two stores to one element with a barrier between: the load after it is no constant, whatever this thread stored."""

    def loads(noalias: bool) -> int:
        m = Maker("shared_global", blocks=1)
        o, p = (m.array(n, i32, CASES["atomics_i32"].arrays["v"]) for n in "op")
        m.b.multi("store", o, m.b.index(0), m.b.const(1, i32))
        m.b.multi("barrier")
        m.b.multi("store", p, m.thread, m.b.op("load", o, m.b.index(0)))
        return len(re.findall(r"ld\.global", ptx_of(m.case(noalias=noalias).kernel)))

    assert loads(noalias=False) == 1


def test_masks_reach_the_instructions() -> None:
    text, _ = llvm_of(CASES["masked"].kernel, "sm_90a")
    for name in ("vote.ballot.sync", "match.any.sync.i32", "match.all.sync.i32p", "bar.warp.sync", "shfl.sync.idx.i32"):
        calls = re.findall(rf"@llvm\.nvvm\.{name}\(i32 ([^,)]+)", text)
        assert any(c.startswith("%") for c in calls), name
    assert re.search(r"redux\.sync\.umax\(i32 %\w+, i32 %\w+\)", text), "the value comes first"


def test_atomics_of_64_bits_are_of_64_bits() -> None:
    ptx = ptx_of(atomics(u64).kernel)
    for word in ("add.u64", "min.u64", "max.u64", "and.b64", "or.b64", "xor.b64", "exch.b64", "cas.b64"):
        assert word in ptx


@pytest.mark.requires("ptxas")
def test_assertions_report_and_trap() -> None:
    case = failing()
    artifact = build_artifact(case.program(), parse_target("sm_90a"))
    assert [text for _, text in artifact.launches[0].asserts] == ["number >= 0", 'number != "71"']
    ptx = artifact.code.decode()
    assert len(re.findall(r"^\s+trap;", ptx, re.MULTILINE)) in (1, 2)
    assert re.search(r"\.visible \.global .* tilewright_watchdog", ptx)
    assemble(ptx, "sm_90a")
    assert deserialise(serialise(artifact)) == artifact


def test_prints_of_two_kernels_share_their_texts() -> None:
    program = printing().program()
    twice = replace(program, calls=program.calls * 2)
    text, _ = llvm_text(twice, parse_target("sm_90a"))
    assert len(re.findall(r"^@tilewright_text_\w+ = ", text, re.MULTILINE)) == len(
        set(re.findall(r"^@(tilewright_text_\w+) = ", text, re.MULTILINE))
    )
    emit_assembly(text, parse_target("sm_90a"))


def test_hints_reach_the_instructions() -> None:
    ptx = ptx_of(CASES["caches"].kernel, "sm_80")
    for word in (
        "ld.global.cs.b32",
        "ld.global.nc.v4.b32",
        "ld.global.L1::no_allocate.v4.b32",
        "st.global.wt.b32",
        "st.global.L1::no_allocate.b16",
    ):
        assert word in ptx, word
    assert re.search(r"createpolicy\.fractional\.L2::evict_first\.b64 (%rd\d+), 1\.0", ptx)
    assert re.search(r"ld\.global\.L2::cache_hint\.v4\.b32 \{.*\}, \[%rd\d+\], %rd\d+;", ptx)
    copies = ptx_of(CASES["copies_with_hints"].kernel, "sm_80")
    assert re.search(
        r"cp\.async\.cg\.shared\.global\.L2::cache_hint\.L2::128B \[%r\d+\], \[%rd\d+\], 16(, %r\d+)?, %rd\d+;", copies
    )


def test_old_values_are_refused() -> None:
    m = Maker("stale")
    o = m.array("o", f32, CASES["atomics_f32"].arrays["v"])
    m.b.multi("store", o, m.number, m.b.op("load", o, m.number, cache="nc"))
    with pytest.raises(UserError, match=r"error\[TW005\]: a load with cache='nc' of an array that the kernel writes"):
        ptx_of(m.case().kernel)


def test_other_blocks_are_reached_through_the_cluster() -> None:
    ptx = ptx_of(CASES["clusters"].kernel)
    for word in (
        "mapa",
        "st.shared::cluster",
        "ld.shared::cluster",
        "atom.relaxed.cluster.shared::cluster.add.u32",
        "atom.acq_rel.cluster.shared::cluster.max.u32",
    ):
        assert word in ptx, word
    assert "atom.relaxed.gpu.shared::cluster.cas.b32" in ptx
    ptx = ptx_of(CASES["bulk_copies"].kernel)
    assert "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes" in ptx
    assert "cp.async.bulk.global.shared::cta.bulk_group" in ptx


def test_ops_of_explicit_kernels_are_named_where_they_are_asked_for() -> None:
    """The code generator loads what writes them for kernels that have one."""
    assert simt.HANDLERS.keys() | simt.BETTER.keys() | simt.FAST.keys() == SIMT
    assert not simt.FAST.keys() & (simt.HANDLERS.keys() | simt.BETTER.keys())
