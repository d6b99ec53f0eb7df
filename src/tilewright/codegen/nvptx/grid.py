"""Barriers of a whole grid, and counters that blocks wait for -> LLVM text for NVIDIA GPUs.

In: a kernel with `grid_barrier`; out: code that meets all blocks of a cooperative launch at one word of memory. The driver
gives every such launch a workspace of its own and its address in two environment registers; the second word of it is for
this (`driver_abi.h` of CUDA says so, and code compiled against it is bound to that). So launches on several streams and in
graphs never share a word.

One thread of each block adds its share to the word: block 0 so much that all shares together are 2^31. Once all have arrived
the word's highest bit has changed, and the others are what they were: the word is ready for the next barrier and never has
to be reset. The addition releases what the block wrote, the reads that wait for the bit acquire what other blocks wrote, and
barriers of the block before and after hand both on to its other threads.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.codegen.llvm.emitter import FunctionWriter
from tilewright.ir.nodes import Kernel, Op, walk

_ALL = 1 << 31
"""What all blocks together add."""
_WORD = 4
"""Where in the launch's workspace the word lies."""


def is_cooperative(kernel: Kernel) -> bool:
    """Whether the kernel's blocks must all run at once."""
    return any(op.opcode in ("grid_barrier", "await_count", "count_up") for op in walk(kernel.body))


def turn_until(w: FunctionWriter, op: Op, ended: str, done: str, again: str) -> None:
    """Go on at `done` when it has ended, else back to `again`."""
    if w.kernel.attrs.get("watchdog"):
        still = w.new_label("still")
        w.line(f"br i1 {ended}, label %{done}, label %{still}")
        w.open_label(still)
        w.dialect.turn(w, op)
        w.line(f"br label %{again}")
    else:
        w.line(f"br i1 {ended}, label %{done}, label %{again}")
    w.open_label(done)


def grid_barrier(w: FunctionWriter, op: Op) -> None:
    # All that the arrival needs is there before the block has come together, and stays there where it meets often.
    word, own = _word(w), _share(w)
    first = w.let(f"icmp eq i32 {_register(w, 'tid.x')}, 0")
    _block_barrier(w)
    meet, again, done, met = (w.new_label(name) for name in ("meet", "wait", "waited", "met"))
    w.line(f"br i1 {first}, label %{meet}, label %{met}")
    w.open_label(meet)
    # LLVM's own atomics have neither scope nor order on this target.
    text = "atom.add.release.gpu.u32 $0, [$1], $2;"
    before = w.let(f'call i32 asm sideeffect "{text}", "=r,l,r,~{{memory}}"(i64 {word}, i32 {own})')
    w.line(f"br label %{again}")
    w.open_label(again)
    now = w.let(f'call i32 asm sideeffect "ld.acquire.gpu.u32 $0, [$1];", "=r,l,~{{memory}}"(i64 {word})')
    changed = w.let(f"icmp slt i32 {w.let(f'xor i32 {before}, {now}')}, 0")
    turn_until(w, op, changed, done, again)
    w.line(f"br label %{met}")
    w.open_label(met)
    _block_barrier(w)


def count_up(w: FunctionWriter, op: Op, operands: Sequence[str]) -> None:
    """The addition releases what this thread wrote, and what it knows of by a barrier of its block."""
    where = w.element_pointer(op.operands[0], operands[1:])
    w.line(f'call void asm sideeffect "red.release.gpu.global.add.u32 [$0], 1;", "l,~{{memory}}"(ptr addrspace(1) {where})')


def await_count(w: FunctionWriter, op: Op, operands: Sequence[str]) -> None:
    """A counter has come to a number where their difference, modulo 2^32, is not negative."""
    where = w.element_pointer(op.operands[0], operands[1:2])
    again, done = w.new_label("wait"), w.new_label("waited")
    w.line(f"br label %{again}")
    w.open_label(again)
    polls = op.attrs.get("polls", "acquire")
    now = _look(w, where, "acquire" if polls == "acquire" else "relaxed")
    come = w.let(f"icmp sge i32 {w.let(f'sub i32 {now}, {operands[2]}')}, 0")
    pause = op.attrs.get("pause", 0)
    if pause:
        still = w.new_label("still")
        w.line(f"br i1 {come}, label %{done}, label %{still}")
        w.open_label(still)
        w.line(f'call void asm sideeffect "nanosleep.u32 {pause};", ""()')
        w.dialect.turn(w, op)
        w.line(f"br label %{again}")
        w.open_label(done)
    else:
        turn_until(w, op, come, done, again)
    if polls == "relaxed":
        _look(w, where, "acquire")  # it sees what the last look saw, or later steps
    elif polls == "fence":
        w.line('fence syncscope("device") acq_rel')


def _look(w: FunctionWriter, where: str, order: str) -> str:
    return w.let(f'call i32 asm sideeffect "ld.{order}.gpu.global.u32 $0, [$1];", "=r,l,~{{memory}}"(ptr addrspace(1) {where})')


def _block_barrier(w: FunctionWriter) -> None:
    w.call("void", "llvm.nvvm.barrier.cta.sync.aligned.all", ("i32", "0"))


def _register(w: FunctionWriter, name: str) -> str:
    return w.call("i32", f"llvm.nvvm.read.ptx.sreg.{name}")


def _word(w: FunctionWriter) -> str:
    """The address of the launch's word."""
    text = "{ .reg .b32 high, low; mov.b32 high, %envreg1; mov.b32 low, %envreg2; mov.b64 $0, {low, high}; }"
    start = w.let(f'call i64 asm "{text}", "=l"()')
    return w.let(f"add i64 {start}, {_WORD}")


def _share(w: FunctionWriter) -> str:
    """What this block adds."""
    x, y, z = (_register(w, f"ctaid.{axis}") for axis in "xyz")
    beyond = w.let(f"or i32 {y}, {z}")
    leads = w.let(f"icmp eq i32 {w.let(f'or i32 {x}, {beyond}')}, 0")
    wide, high, deep = (_register(w, f"nctaid.{axis}") for axis in "xyz")
    layer = w.let(f"mul i32 {wide}, {high}")
    blocks = w.let(f"mul i32 {layer}, {deep}")
    rest = w.let(f"sub i32 {_ALL + 1 - (1 << 32)}, {blocks}")
    return w.let(f"select i1 {leads}, i32 {rest}, i32 1")
