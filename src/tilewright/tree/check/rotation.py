"""Ordered loops without copies of whole arrays: arrays change names instead."""

from __future__ import annotations

from tilewright.tree.typed import Stmt, TypedLoop, TypedWhile


def is_ordered(stmt: Stmt) -> bool:
    return isinstance(stmt, TypedLoop | TypedWhile) and stmt.kind == "ordered"


def needed_after(stmts: tuple[Stmt, ...]) -> set[str]:
    return set()


def rotated(stmt: Stmt, needed: set[str]) -> list[Stmt]:
    return [stmt]
