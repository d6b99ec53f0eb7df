"""The checker. In: a syntax tree and what is known of its arguments. Out: a typed tree, or errors at the user's line.

`kernel.py` is the way in. `body.py` walks statements, `expressions.py` expressions, `arrays.py`, `slices.py` and `tiles.py` values with a
shape; `infer.py` and `solve.py` find dtypes and sizes; `loops.py` says which loops are parallel.
"""
