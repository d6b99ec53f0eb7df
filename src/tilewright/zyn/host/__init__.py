"""Statements, expressions and functions of ZynML programs around their compute blocks."""
