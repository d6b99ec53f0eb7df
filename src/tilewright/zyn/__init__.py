"""The ZynML host language. In: a parsed program. Out: its run: statements one by one, compute blocks as kernels.

`host/` runs statements, `lazy/` has blocks that wait to be fused, `replay/` makes the next runs fast.
"""
