"""A watchdog compiled into a GPU kernel. In: a kernel with the attribute `watchdog` (nanoseconds); out: tests in its open-ended loops.

A loop is open-ended when something read from memory decides how often it turns; so is every wait for another thread. At each turn
the thread compares the GPU's clock with the time it began. When it is late it writes where it is to the word that the module's
variable `tilewright_watchdog` points to, memory of the host, and traps: the context is lost, but the process can read why.
"""

from __future__ import annotations

from tilewright.base.abi import WATCHDOG_MARK, WATCHDOG_SYMBOL
from tilewright.codegen.llvm.emitter import FunctionWriter
from tilewright.ir.nodes import Block, Kernel, Op, Value

WAITS = frozenset({"mbarrier_wait", "await_flag", "await_count", "grid_barrier"})
_READS = frozenset({"load", "atomic", "atomic_load", "atomic_remote", "load_remote"})


class Watchdog:
    """The watchdog of one kernel; it does nothing where the kernel has none."""

    def __init__(self, kernel: Kernel) -> None:
        limit = kernel.attrs.get("watchdog", 0)
        number = kernel.attrs.get("watchdog_number", 0)
        assert isinstance(limit, int)
        assert isinstance(number, int)
        self.limit, self._number = limit, number
        self._line = kernel.span.line
        self._open = _open_loops(kernel.body) if limit else set()
        self._late_at = ""

    def begin(self, w: FunctionWriter) -> None:
        """At the kernel's start: until when it may run."""
        if self._open:
            w.declarations.add(f"@{WATCHDOG_SYMBOL} = addrspace(1) externally_initialized global ptr null, align 8")
            self._late_at = w.let(f"add i64 {_clock(w)}, {self.limit}")

    def turn(self, w: FunctionWriter, op: Op) -> None:
        """Where a loop or a wait turns."""
        if id(op) not in self._open:
            return
        late, going = w.new_label("late"), w.new_label("going")
        too_late = w.let(f"icmp ugt i64 {_clock(w)}, {self._late_at}")
        w.line(f"br i1 {too_late}, label %{late}, label %{going}")
        w.open_label(late)
        place = w.let(f"load volatile ptr, ptr addrspace(1) @{WATCHDOG_SYMBOL}")
        code = op.attrs.get("code", 0)
        assert isinstance(code, int)
        w.line(f"store volatile i64 {WATCHDOG_MARK | self._number << 32 | (code or op.span.line or self._line)}, ptr {place}")
        w.line('call void asm sideeffect "fence.sc.sys;", "~{memory}"()')
        w.call("void", "llvm.trap", attributes=" noreturn")
        w.line("unreachable")
        w.open_label(going)


def _clock(w: FunctionWriter) -> str:
    """Nanoseconds; `sideeffect`, so that it is read at every turn."""
    return w.let('call i64 asm sideeffect "mov.u64 $0, %globaltimer;", "=l"()')


def _open_loops(body: Block) -> set[int]:
    """Waits, `while`, and the `for`s whose bounds depend on what was read; by identity."""
    found: set[int] = set()
    read: set[Value] = set()

    def visit(block: Block) -> None:
        for op in block.ops:
            depends = op.opcode in _READS or any(v in read for v in op.operands)
            if op.opcode in WAITS or op.opcode == "while" or (op.opcode == "for" and any(v in read for v in op.operands[:3])):
                found.add(id(op))
            for region in op.regions:
                visit(region)
            # What a region yields may have been read inside it.
            if depends or op.regions:
                read.update(op.results)

    visit(body)
    return found
