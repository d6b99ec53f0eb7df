"""Proofs about critical functions: what the machine code does, read off the object that was emitted.

In: a function's object, with C's calling convention and nothing of CPython. Out: a `CriticalProof`: its instructions, calls, system calls, branches, accesses of memory,
the bytes of its stack and the longest way through it. The disassembler is Capstone (`pip install tilewright[critical]`).

What is shown: no instruction calls, or jumps to, code outside of the function; so nothing allocates, locks or asks the system, since all of these are calls or one
instruction that is looked for. The stack pointer moves by constants only, so the bound of the stack is their sum.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

from tilewright.base.errors import UserError
from tilewright.base.target import Target
from tilewright.codegen.critical.c_function import c_function_text
from tilewright.codegen.critical.elf import ARM, FunctionCode, read_functions
from tilewright.codegen.llvm import native
from tilewright.compile.critical import CompiledCritical
from tilewright.compile.critical_estimate import LatencyEstimate, estimate
from tilewright.ir.nodes import walk

SYMBOL = "critical_function"
_LIBRARY = {"fma": "fma", "fmaf": "fma", "fmod": "mod", "fmodf": "mod", "memset": "store", "memcpy": "load", "memmove": "load"}
"""Ops that LLVM may make calls of the C library of."""
_SYSTEM = frozenset({"svc", "hvc", "smc", "syscall", "sysenter", "int"})
_ENDS = frozenset({"ret", "retq", "b", "br", "jmp", "udf", "ud2", "brk"})


@dataclass(frozen=True)
class CriticalProof:
    """What is known of a function's machine code."""

    name: str
    target: str
    instructions: int
    code_bytes: int
    branches: int
    """Conditional ones."""
    loops: int
    path: int
    """Instructions of the longest way from the entry to a return; a loop counts once."""
    loads: int
    stores: int
    calls: tuple[str, ...]
    """Functions that it calls or jumps to outside of itself."""
    system_calls: tuple[str, ...]
    stack_bytes: int | None
    """The most that its frame takes; None where it is not known."""
    faults: int
    estimate: LatencyEstimate
    """Cycles of the longest way, by a model of a core: an estimate, where `tw.latency` measures."""
    entry_calls: tuple[str, ...]
    """What the CPython entry around it may call: on its way (a result that is an object), and where arguments are not exact."""

    @property
    def no_calls(self) -> bool:
        return not self.calls

    @property
    def no_allocation(self) -> bool:
        """No instruction leaves the function, so nothing is allocated; its own arrays are in a frame of known size."""
        return not self.calls and self.stack_bytes is not None

    @property
    def no_syscalls(self) -> bool:
        return not self.calls and not self.system_calls

    def __repr__(self) -> str:
        proved = " and ".join(word for word, holds in (("no allocation", self.no_allocation), ("no system call", self.no_syscalls)) if holds)
        return f"<proof of {self.name} for {self.target}: {proved or 'nothing'} proved, {self.instructions} instructions, longest way {self.path}>"

    def __str__(self) -> str:
        stack = "not known" if self.stack_bytes is None else f"{self.stack_bytes} bytes"
        turns = f", {self.loops} loop(s), each counted once" if self.loops else ""
        lines = [
            f"{self.name} for {self.target}: {self.instructions} instructions, {self.code_bytes} bytes",
            f"  longest way    {self.path} instructions{turns}",
            f"  branches       {self.branches}",
            f"  memory         {self.loads} loads, {self.stores} stores",
            f"  stack          {stack}",
            f"  estimate       {self.estimate}",
            f"  faults         {self.faults} places where it may end early",
            f"  no allocation  {'proved: no instruction leaves the function' if self.no_allocation else 'NOT proved: ' + (', '.join(self.calls) or 'the stack has no bound')}",
            f"  no system call {'proved' if self.no_syscalls else 'NOT proved: ' + ', '.join((*self.calls, *self.system_calls))}",
            f"  CPython entry  apart from this; it may call {', '.join(self.entry_calls)}",
        ]
        return "\n".join(lines)


def prove(name: str, compiled: CompiledCritical, target: Target) -> CriticalProof:
    """Read the object of a function. Raises `UserError` where Capstone is not installed."""
    code = native.compile_object(c_function_text(compiled.critical, target, SYMBOL), target)
    found = read_functions(code)
    (function,) = (f for f in found.functions if f.name == SYMBOL)
    counts = _CodeReading(function, found.machine)
    entry = read_functions(compiled.code)
    return CriticalProof(
        name, target.name, len(counts.lines), len(function.code), counts.branches, counts.loops, counts.path(), counts.loads, counts.stores,
        tuple(sorted({*counts.calls, *(n for n in found.undefined if not n.startswith("_GLOBAL_OFFSET"))})), tuple(counts.system), counts.stack(), len(compiled.faults),
        estimate(counts.lines, counts.follow, counts.arm),
        tuple(n for n in entry.undefined if n.startswith(("Py", "_Py")) and not n.endswith(("Struct", "_Type"))),
    )  # fmt: skip


def estimate_object(code: bytes) -> LatencyEstimate:
    """The static estimate alone, of an object for any CPU."""
    found = read_functions(code)
    (function,) = (f for f in found.functions if f.name == SYMBOL)
    counts = _CodeReading(function, found.machine)
    return estimate(counts.lines, counts.follow, counts.arm)


def refusal(name: str, compiled: CompiledCritical, proof: CriticalProof, wanted: str) -> UserError:
    """The error for a function that does not keep its promise: which construct, at which line."""
    (call,) = compiled.program.calls
    for symbol in proof.calls:
        for op in walk(call.kernel.body):
            if op.opcode == _LIBRARY.get(symbol):
                return _refused(f"{name} is marked @tw.{wanted}, but '{op.opcode}' becomes a call of {symbol}, which leaves the compiled code", op.span)
    reason = f"it calls {', '.join(proof.calls)}" if proof.calls else f"it has {', '.join(proof.system_calls)}" if proof.system_calls else "its stack has no bound"
    return _refused(f"{name} is marked @tw.{wanted}, which cannot be proved: {reason}", compiled.built.kernel.span)


def _refused(text: str, span: Any) -> UserError:
    error = UserError.at("TW012", text, span, "write it another way, or drop the mark")
    assert isinstance(error, UserError)
    return error


class _CodeReading:
    """One function, instruction by instruction."""

    def __init__(self, function: FunctionCode, machine: int) -> None:
        self.arm = machine == ARM
        self.lines = list(_disassembler(machine).disasm(function.code, 0))
        end = len(function.code)
        self.decoded = sum(len(i.bytes) for i in self.lines) == end
        self.named = {offset: symbol for offset, symbol, _ in function.named}
        self.branches = self.loads = self.stores = 0
        self.calls: set[str] = set() if self.decoded else {"instructions that are not known"}
        self.system: list[str] = []
        self.moves: list[int | None] = []
        self.below = 0
        """Bytes that are used below the stack pointer: x86-64 lets functions that call nothing have 128 of them without moving it."""
        self.follow: dict[int, list[int]] = {}
        for line in self.lines:
            self._one(line, end)

    def _one(self, line: Any, end: int) -> None:
        name, text = line.mnemonic, line.op_str
        after = line.address + line.size
        following = [after]
        target = _target(text) if _is_jump(name, self.arm) else None
        if name in _SYSTEM:
            self.system.append(name)
        if name in ("bl", "blr", "call", "callq", "lcall"):
            self.calls.add(next((self.named[k] for k in range(line.address, after) if k in self.named), text or name))
        elif name in ("br", "jmp") and target is None:
            self.calls.add(f"an indirect jump ({name} {text})")
            following = []
        elif target is not None:
            outside = next((self.named[k] for k in range(line.address, after) if k in self.named), "")
            if outside or not 0 <= target < end:
                self.calls.add(outside or f"{target:#x}")
                following = []
            else:
                conditional = name not in ("b", "jmp")
                self.branches += conditional
                following = [target, after] if conditional else [target]
        elif name in _ENDS:
            following = []
        self.follow[line.address] = [place for place in following if place < end]
        self._memory(name, text)
        self._stack(name, text)

    def _memory(self, name: str, text: str) -> None:
        if self.arm:
            self.loads += name.startswith(("ld", "cas", "swp"))
            self.stores += name.startswith(("st", "cas", "swp", "ldadd", "ldclr", "ldset"))
        elif "[" in text and not name.startswith(("lea", "nop", "prefetch")):
            writes = text.split(",")[0].count("[") and not name.startswith(("cmp", "test", "ucomis", "comis", "vucomis", "vcomis", "bt"))
            self.stores += bool(writes)
            self.loads += not writes or not name.startswith(("mov", "vmov", "set"))

    def _stack(self, name: str, text: str) -> None:
        """Where the stack pointer moves down: by how much; None where that is computed."""
        if self.arm:
            pushed = re.search(r"\[sp, #-(\w+)\]!", text)
            if pushed:
                self.moves.append(int(pushed[1], 0))
            elif name == "sub" and text.startswith("sp, sp, #"):
                number = re.match(r"sp, sp, #(\w+)(?:, lsl #(\w+))?$", text)
                self.moves.append(int(number[1], 0) << int(number[2] or "0", 0) if number else None)
            elif name in ("sub", "and", "mov") and text.startswith("sp, ") and not re.match(r"sp, (x29|sp)", text):
                self.moves.append(None)
        elif name.startswith("push"):
            self.moves.append(8)
        elif name.startswith("sub") and text.startswith("rsp, "):
            number = re.match(r"rsp, (0x[0-9a-f]+|\d+)$", text)
            self.moves.append(int(number[1], 0) if number else None)
        else:
            below = re.search(r"\[rsp[^\]]* - (0x[0-9a-f]+|\d+)\]", text)
            self.below = max(self.below, int(below[1], 0) if below else 0)

    def stack(self) -> int | None:
        return None if any(m is None for m in self.moves) else sum(m for m in self.moves if m is not None) + self.below

    def path(self) -> int:
        """Instructions of the longest way; a loop counts once."""
        longest: dict[int, int] = {}
        for group in self.groups:  # those that follow come first
            inside = set(group)
            onward = [longest[place] for here in group for place in self.follow[here] if place not in inside and place in longest]
            length = len(group) + max(onward, default=0)
            longest |= dict.fromkeys(group, length)
        return longest.get(0, 0)

    @functools.cached_property
    def groups(self) -> list[list[int]]:
        """Instructions that reach each other, as one group; a group comes after all that it leads to (Tarjan's order)."""
        number: dict[int, int] = {}
        low: dict[int, int] = {}
        stack: list[int] = []
        on_stack: set[int] = set()
        found: list[list[int]] = []
        for root in self.follow:
            if root in number:
                continue
            work = [(root, 0)]
            while work:
                here, at = work.pop()
                if not at:
                    number[here] = low[here] = len(number)
                    stack.append(here)
                    on_stack.add(here)
                onward = [place for place in self.follow[here] if place in self.follow]
                if at:
                    low[here] = min(low[here], low[onward[at - 1]])
                for k in range(at, len(onward)):
                    place = onward[k]
                    if place not in number:
                        work += [(here, k + 1), (place, 0)]
                        break
                    if place in on_stack:
                        low[here] = min(low[here], number[place])
                else:
                    if low[here] == number[here]:
                        cut = stack.index(here)
                        found.append(stack[cut:])
                        on_stack -= set(stack[cut:])
                        del stack[cut:]
        return found

    @property
    def loops(self) -> int:
        """Groups of instructions that are run again and again."""
        return sum(len(group) > 1 or group[0] in self.follow[group[0]] for group in self.groups)


def _is_jump(name: str, arm: bool) -> bool:
    if arm:
        return name in ("b", "cbz", "cbnz", "tbz", "tbnz") or name.startswith(("b.", "bc."))
    return name.startswith(("j", "loop"))


def _target(text: str) -> int | None:
    found = re.search(r"#?(0x[0-9a-f]+|\d+)$", text)
    return int(found[1], 0) if found else None


def _disassembler(machine: int) -> Any:
    try:
        import capstone
    except ImportError:
        raise UserError.at("TW030", "proofs need the disassembler Capstone", help="pip install 'tilewright[critical]'") from None
    found = capstone.Cs(capstone.CS_ARCH_ARM64, capstone.CS_MODE_ARM) if machine == ARM else capstone.Cs(capstone.CS_ARCH_X86, capstone.CS_MODE_64)
    found.detail = True
    return found
