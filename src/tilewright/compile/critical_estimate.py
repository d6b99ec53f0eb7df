"""A static estimate of a critical function's latency: cycles of its longest way on a model of the core.

In: the disassembled function. Out: a `LatencyEstimate`. The code is walked from its entry. Where a branch depends on constants alone, as that of a loop with a constant
number of turns, the way that the processor would go is taken, else the longer one; a loop whose turns are not known counts once. The instructions of that way then
pass through a model of a core that executes out of order (`codegen/critical/core_tables.py`): so many enter in a cycle, each waits for what it reads and for a pipe.

What the model leaves out: caches beyond the first, branches that are not foreseen, and limits of a core that its table does not name.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tilewright.codegen.critical.core_tables import CoreTable, core_table

_MOST_STEPS = 40_000
_CALLS = 6
"""Calls one after the other, of which the last ones count as steady."""
_ZERO = frozenset({"xzr", "wzr"})
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class BlockCycles:
    """Instructions without a branch between them, on the longest way."""

    offset: int
    instructions: int
    turns: int
    cycles: int
    """Of one turn by itself; on the way, blocks overlap."""


@dataclass(frozen=True)
class LatencyEstimate:
    """Cycles of a call's longest way, by a model of a core."""

    core: str
    alone: int
    """From the entry until every result is there, with nothing else under way."""
    repeated: float
    """Of a call among calls one after the other with the same arguments, as `tw.latency` makes them."""
    steps: int
    """Instructions that the way executes."""
    open_loops: int
    """Loops whose turns are not known: they count once."""
    blocks: tuple[BlockCycles, ...]

    def table(self) -> str:
        """The blocks of the longest way, in its order."""
        lines = ["  block   instructions  turns  cycles"]
        lines += [f"  {f'+{block.offset:#x}':<8}{block.instructions:>12}{block.turns:>7}{block.cycles:>8}" for block in self.blocks]
        return "\n".join(lines)

    def __str__(self) -> str:
        said = f", {self.open_loops} loop(s) of unknown length counted once" if self.open_loops else ""
        return f"{self.alone} cycles alone, {self.repeated:.1f} among others, of {self.steps} instructions{said} (a model of {self.core})"


@dataclass
class _CodeStep:
    """An instruction as the model sees it."""

    address: int
    name: str
    text: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    address_of: tuple[str, ...] = ()
    """Registers of an address in memory, which are read too."""
    place: str = ""
    """The text of that address."""
    loads: bool = False
    stores: bool = False


def estimate(lines: Sequence[Any], follow: dict[int, list[int]], arm: bool) -> LatencyEstimate:
    """The estimate of a function. `lines`: Capstone's instructions; `follow`: which may come after each."""
    steps = {line.address: (_arm_step if arm else _x86_step)(line) for line in lines}
    way, unknown = _CodeWalk(steps, follow, arm).run()
    table = core_table(arm)
    core = _CoreRun(table)
    alone = core.run(way)
    blocks = _blocks(way, table)
    ends = [core.run(way) for _ in range(_CALLS)] if len(way) * _CALLS <= 4 * _MOST_STEPS else [alone, 2 * alone]
    half = len(ends) // 2
    repeated = (ends[-1] - ends[half - 1]) / (len(ends) - half)
    return LatencyEstimate(table.name, alone, repeated, len(way), unknown, blocks)


# -- which instructions ------------------------------------------------------------------------------------------------


@dataclass
class _CodeWalk:
    """Follows the code with the integers that are known."""

    steps: dict[int, _CodeStep]
    follow: dict[int, list[int]]
    arm: bool
    known: dict[str, int] = field(default_factory=dict)
    flags: tuple[int, int] | None = None
    """The two numbers that were compared, where they are known."""

    def run(self) -> tuple[list[_CodeStep], int]:
        weight = self._weights()
        way: list[_CodeStep] = []
        seen: Counter[int] = Counter()
        unknown: set[int] = set()
        here: int | None = min(self.steps, default=None)
        while here is not None and len(way) < _MOST_STEPS:
            step = self.steps[here]
            way.append(step)
            seen[here] += 1
            onward = [place for place in self.follow[here] if place in self.steps]
            decided = self._decided(step) if len(onward) > 1 else None
            (self._arm if self.arm else self._x86)(step)
            if decided is not None:
                here = onward[0] if decided else onward[1]
            elif len(onward) > 1:
                new = [place for place in onward if not seen[place]]
                if any(place <= here and seen[place] for place in onward):
                    unknown.add(here)
                if not new:
                    forward = [place for place in onward if place > here]
                    new = forward or onward[1:]
                    if seen[here] > 64:
                        break
                here = max(new, key=lambda place: weight[place])
            else:
                here = onward[0] if onward else None
                if here is not None and here <= step.address and seen[here]:
                    unknown.add(step.address)
                    if seen[here] > 1:
                        break
        return way, len(unknown)

    def _weights(self) -> dict[int, int]:
        """Instructions of the longest way on from each; ways back are not taken."""
        found: dict[int, int] = {}
        for here in sorted(self.steps, reverse=True):
            found[here] = 1 + max((found.get(place, 0) for place in self.follow[here]), default=0)
        for here in sorted(self.steps):  # a jump back to code that was placed before, such as the common end
            onward = self.follow[here]
            if len(onward) == 1 and onward[0] <= here:
                found[here] = 1 + found.get(onward[0], 0)
        return found

    def _decided(self, step: _CodeStep) -> bool | None:
        """Whether a branch is taken, where that is known."""
        name, parts = step.name, _operands(step.text)
        if self.arm and name in ("cbz", "cbnz"):
            value = self._value(parts[0])
            return None if value is None else (value == 0) == (name == "cbz")
        if self.arm and name in ("tbz", "tbnz"):
            value = self._value(parts[0])
            return None if value is None else (value >> int(parts[1].lstrip("#"), 0) & 1 == 0) == (name == "tbz")
        if self.flags is None:
            return None
        a, b = self.flags
        signed = [v - (1 << 64) if v >> 63 else v for v in (a, b)]
        tests = {
            "eq": a == b, "ne": a != b, "lt": signed[0] < signed[1], "ge": signed[0] >= signed[1], "gt": signed[0] > signed[1], "le": signed[0] <= signed[1],
            "lo": a < b, "hs": a >= b, "hi": a > b, "ls": a <= b, "cc": a < b, "cs": a >= b,
            "e": a == b, "l": signed[0] < signed[1], "g": signed[0] > signed[1], "b": a < b, "ae": a >= b, "a": a > b, "be": a <= b,
        }  # fmt: skip
        return tests.get(name.partition(".")[2] if self.arm else name[1:])

    def _value(self, operand: str) -> int | None:
        if operand in _ZERO:
            return 0
        if re.fullmatch(r"#?-?(0x[0-9a-f]+|\d+)", operand):
            return int(operand.lstrip("#"), 0) & _MASK
        return self.known.get(_register(operand, self.arm))

    def _set(self, operand: str, value: int | None) -> None:
        register = _register(operand, self.arm)
        if value is None:
            self.known.pop(register, None)
        else:
            narrow = operand.startswith("w") if self.arm else operand.startswith("e")
            self.known[register] = value & (0xFFFFFFFF if narrow else _MASK)

    def _forget(self, step: _CodeStep) -> None:
        for register in step.writes:
            self.known.pop(register, None)
        if "flags" in step.writes:
            self.flags = None

    def _arm(self, step: _CodeStep) -> None:
        name, parts = step.name, _operands(step.text)
        values = [self._value(part) for part in parts[1:]]
        if name == "mov" and len(parts) == 2:
            self._forget(step)
            self._set(parts[0], values[0])
        elif name in ("add", "sub", "adds", "subs", "and", "orr", "lsl", "lsr") and len(parts) == 3:
            self._forget(step)
            result = _computed(name, values[0], values[1])
            if name in ("adds", "subs"):
                self.flags = (values[0], values[1]) if name == "subs" and values[0] is not None and values[1] is not None else None
            if parts[0] not in _ZERO:
                self._set(parts[0], result)
        elif name == "cmp" and len(parts) == 2:
            first, second = self._value(parts[0]), values[0]
            self.flags = (first, second) if first is not None and second is not None else None
        else:
            self._forget(step)

    def _x86(self, step: _CodeStep) -> None:
        name, parts = step.name, _operands(step.text)
        if any("[" in part for part in parts) or not parts:
            self._forget(step)
            return
        values = [self._value(part) for part in parts]
        if name in ("mov", "movabs") and len(parts) == 2:
            self._forget(step)
            self._set(parts[0], values[1])
        elif name == "xor" and len(parts) == 2 and parts[0] == parts[1]:
            self._forget(step)
            self._set(parts[0], 0)
        elif name in ("add", "sub", "and", "inc", "dec"):
            self._forget(step)
            amount = values[1] if len(values) > 1 else 1
            result = _computed({"inc": "add", "dec": "sub"}.get(name, name), values[0], amount)
            self._set(parts[0], result)
            self.flags = (result, 0) if result is not None else None
        elif name in ("cmp", "test") and len(parts) == 2:
            a, b = values
            if name == "test":
                a, b = (a if parts[0] == parts[1] else None), 0
            self.flags = (a, b) if a is not None and b is not None else None
        else:
            self._forget(step)


def _computed(name: str, a: int | None, b: int | None) -> int | None:
    if a is None or b is None:
        return None
    found = {"add": a + b, "sub": a - b, "and": a & b, "orr": a | b}.get(name.rstrip("s") if name in ("adds", "subs") else name)
    if found is None:
        found = a << (b & 63) if name == "lsl" else a >> (b & 63)
    return found & _MASK


# -- how long ----------------------------------------------------------------------------------------------------------


class _CoreRun:
    """A core that executes out of order. Calls of `run` follow each other: what they wrote to memory is there."""

    def __init__(self, table: CoreTable) -> None:
        self.table = table
        self.busy: dict[str, Counter[int]] = {pipe: Counter() for pipe in table.pipes}
        self.stored: dict[str, int] = {}
        """When the data of a place in memory is there for loads."""
        self.retired: list[int] = []
        self.number = 0

    def run(self, way: Sequence[_CodeStep]) -> int:
        """Execute instructions; the cycle in which the last result is there."""
        table = self.table
        ready: dict[str, int] = {}  # arguments are there; nothing else passes from call to call in registers
        version: Counter[str] = Counter()
        last = self.retired[-1] if self.retired else 0
        for step in way:
            enters = self.number // table.width
            if len(self.retired) >= table.window:
                enters = max(enters, self.retired[-table.window])
                self.number = max(self.number, enters * table.width)
            self.number += 1
            kind = table.kind(step.name, step.text)
            place = ""
            reached = max([enters, *(ready.get(r, 0) for r in step.address_of)])
            if step.loads or step.stores:
                place = step.place + "".join(f"|{r}{version[r]}" for r in step.address_of)
                if step.loads and place in self.stored:
                    reached = max(reached, self.stored[place] + table.forward)
            if step.loads and kind.pipe not in ("load", "store"):  # x86: an operand in memory, loaded before the rest is needed
                reached = self._pipe("load", reached, 1) + table.load
            begins = self._pipe(kind.pipe, max([reached, *(ready.get(r, 0) for r in step.reads)]), kind.holds)
            ends = begins + kind.latency
            for register in step.writes:
                ready[register] = ends
                version[register] += 1
            if step.stores:
                self.stored[place] = ends
            last = max(last, ends)
            self.retired.append(last)
        return last

    def _pipe(self, pipe: str, cycle: int, holds: int) -> int:
        if not pipe:
            return cycle
        busy, count = self.busy[pipe], self.table.pipes[pipe]
        while any(busy[cycle + k] >= count for k in range(holds)):
            cycle += 1
        for k in range(holds):
            busy[cycle + k] += 1
        return cycle


def _blocks(way: Sequence[_CodeStep], table: CoreTable) -> tuple[BlockCycles, ...]:
    """The way in stretches that are entered at their first instruction and left at their last."""
    starts = {way[0].address} if way else set()
    for before, after in pairwise(way):
        if _is_branch(before.name):
            starts.add(after.address)
    stretches: dict[int, Sequence[_CodeStep]] = {}
    turns: Counter[int] = Counter()
    first = 0
    for k in range(1, len(way) + 1):
        if k == len(way) or way[k].address in starts:
            stretches.setdefault(way[first].address, way[first:k])
            turns[way[first].address] += 1
            first = k
    return tuple(BlockCycles(offset, len(part), turns[offset], _CoreRun(table).run(part)) for offset, part in stretches.items())


# -- reading instructions ----------------------------------------------------------------------------------------------

_ARM_REGISTER = re.compile(r"\b(?:([wx])(\d+)|([vbhsdq])(\d+)(?:\.\w+)?(?:\[\d+\])?|(sp|wsp|xzr|wzr))\b")
_ARM_READERS = ("cmp", "cmn", "tst", "fcmp", "ccmp", "ccmn", "cb", "tb", "b", "ret", "prfm", "nop")
_ARM_UPDATES = ("fmla", "fmls", "mla", "mls", "ins", "movk", "bfi", "bfxil", "bfm", "bsl", "bit", "bif", "sdot", "udot")
_ARM_FLAGS_READ = re.compile(r"b\.|cs(el|inc|inv|neg)|cset|csetm|cinc|cinv|cneg|fcsel|ccm|fccmp|adc|sbc")
_ARM_FLAGS_WRITTEN = re.compile(r"cmp|cmn|tst|fcmp|ccm|fccmp|adds|subs|ands|bics|adcs|sbcs")


def _register(text: str, arm: bool) -> str:
    """One name for all widths of a register."""
    if arm:
        found = _ARM_REGISTER.fullmatch(text)
        return "" if found is None or found[5] in _ZERO else f"x{found[2]}" if found[1] else f"v{found[4]}" if found[3] else found[5] or ""
    text = re.sub(r"^[yz]mm", "xmm", text)
    extended = re.fullmatch(r"(r\d+)[dwb]?", text)
    if extended:
        return extended[1]
    short = re.fullmatch(r"[er]?([abcd])[xlh]|[er]?(si|di|bp|sp)l?", text)
    return text if short is None else f"r{short[1]}x" if short[1] else f"r{short[2]}"


def _operands(text: str) -> list[str]:
    return [part.strip() for part in re.split(r",(?![^\[]*\])", text)] if text else []


def _arm_registers(text: str) -> list[str]:
    return [name for name in (_register(found[0], True) for found in _ARM_REGISTER.finditer(text)) if name]


def _arm_step(line: Any) -> _CodeStep:
    name, text = line.mnemonic, line.op_str
    address = re.search(r"\[([^\]]*)\]", text) if not re.search(r"\bv\d+\.\w+\[", text) else re.search(r"\[([xs][^\]]*)\]", text)
    parts = _operands(text.replace("{", "").replace("}", ""))
    plain = [part for part in parts if "[" not in part or part.startswith("v")]
    of_address = _arm_registers(address[1]) if address else []
    stores = bool(address) and name.startswith(("st", "cas", "swp", "ldadd", "ldclr", "ldset", "ldeor", "ldsm", "ldum"))
    loads = bool(address) and name.startswith(("ld", "cas", "swp"))
    writes: list[str] = []
    if name.startswith(("st", *_ARM_READERS)) and not name.startswith(("bic", "bfi", "bfx", "bfm", "bsl", "bit", "bif", "stx", "stlx")):
        reads = [r for part in plain for r in _arm_registers(part)]
    elif name.startswith(("ldp", "ldnp", "ldxp", "ld1", "ld2", "ld3", "ld4")):
        writes = [r for part in plain for r in _arm_registers(part)]
        reads = []
    elif loads and stores and not name.startswith("cas"):  # swp, ldadd: what is added, then the old value
        writes = _arm_registers(plain[-1]) if plain else []
        reads = [r for part in plain[:-1] for r in _arm_registers(part)]
    else:
        writes = _arm_registers(plain[0]) if plain else []
        reads = [r for part in plain[1:] for r in _arm_registers(part)]
        if name.startswith((*_ARM_UPDATES, "cas")) or re.match(r"v\d+(\.\w+)?\[", plain[0] if plain else ""):
            reads += writes
    if address and (text.rstrip().endswith("!") or not text.rstrip().endswith("]")):  # the base register moves
        writes += of_address[:1]
    if _ARM_FLAGS_READ.match(name):
        reads.append("flags")
    if _ARM_FLAGS_WRITTEN.match(name):
        writes.append("flags")
    return _CodeStep(line.address, name, text, tuple(reads), tuple(writes), tuple(of_address), address[1] if address else "", loads, stores)


def _x86_step(line: Any) -> _CodeStep:
    name, text = line.mnemonic, line.op_str
    read, written = line.regs_access()
    reads = [_flag_or_register(line.reg_name(r)) for r in read]
    writes = [_flag_or_register(line.reg_name(r)) for r in written]
    if re.match(r"v?p?xor\w*$", name) and len(set(_operands(text)[-2:])) == 1:
        reads = [r for r in reads if r not in writes]  # a register with itself: zero
    address = re.search(r"\[([^\]]*)\]", text) if not name.startswith(("lea", "nop", "prefetch")) else None
    of_address = [_register(word, False) for word in re.findall(r"[a-z]\w+", address[1])] if address else []
    first = _operands(text)[0] if text else ""
    stores = bool(address) and "[" in first and not name.startswith(("cmp", "test", "ucomis", "comis", "vucomis", "vcomis", "bt", "j", "call"))
    loads = bool(address) and (not stores or not name.startswith(("mov", "vmov", "set")))
    return _CodeStep(line.address, name, text, tuple(r for r in reads if r not in of_address or f"{r}" in text.replace(address[0] if address else "", "")),
                 tuple(writes), tuple(of_address), address[1] if address else "", loads, stores)  # fmt: skip


def _flag_or_register(name: str) -> str:
    return "flags" if name in ("rflags", "eflags", "flags") else _register(name, False)


def _is_branch(name: str) -> bool:
    return name in ("b", "br", "ret", "cbz", "cbnz", "tbz", "tbnz", "jmp") or name.startswith(("b.", "j"))
