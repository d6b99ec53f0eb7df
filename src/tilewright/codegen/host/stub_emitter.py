"""The pen entry stubs are written with: lines of LLVM text, fresh registers and labels, and conditions that lead out of the stub.

In: instructions, one by one; out: `lines`. Conditions are collected by `require` and tested together by `settle`.
"""

from __future__ import annotations


class StubEmitter:
    """Writes the body of one function, front to back."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.count = 0
        self.current = "entry"
        self.pending: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(f"  {text}")

    def new(self, instruction: str) -> str:
        self.count += 1
        register = f"%v{self.count}"
        self.line(f"{register} = {instruction}")
        return register

    def fresh_label(self, name: str) -> str:
        self.count += 1
        return f"{name}.{self.count}"

    def start(self, label: str) -> None:
        self.lines.append(f"{label}:")
        self.current = label

    def jump(self, label: str) -> None:
        self.line(f"br label %{label}")

    def fork(self, condition: str, yes: str, no: str) -> None:
        self.line(f"br i1 {condition}, label %{yes}, label %{no}")

    def load(self, kind: str, base: str, offset: int) -> str:
        address = self.new(f"getelementptr i8, ptr {base}, i64 {offset}") if offset else base
        return self.new(f"load {kind}, ptr {address}")

    def require(self, condition: str) -> None:
        """Must hold; tested with the others at the next `settle`."""
        self.pending.append(condition)

    def settle(self, otherwise: str = "reject") -> None:
        """Leave for `otherwise` unless all that was required holds."""
        if not self.pending:
            return
        total = self.pending[0]
        for condition in self.pending[1:]:
            total = self.new(f"and i1 {total}, {condition}")
        self.pending.clear()
        go_on = self.fresh_label("ok")
        self.fork(total, go_on, otherwise)
        self.start(go_on)

    def equal(self, kind: str, a: str, b: str) -> str:
        return self.new(f"icmp eq {kind} {a}, {b}")
