"""The syntax tree, its checker and the typed tree.

In: `Function` nodes from a front end. Out: a `TypedKernel` with dtypes, symbolic sizes and classified loops. `check/` is the checker; the
other files are the trees themselves and questions about them.
"""
