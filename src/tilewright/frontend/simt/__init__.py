"""Explicit kernels (`@tw.gpu`, `@tw.cpu`). In: a Python function that says what one thread does. Out: a thread-stage kernel.

`kernels.py` is the way in, `words.py` the table of words, `statements.py`, `flow.py` and `loops.py` control flow, `expressions.py` the rest.
"""
