"""Source text to trees. In: Python functions and ZynML text. Out: `tree.syntax`; for explicit kernels thread-stage IR.

`python/` reads kernels, `zyn/` ZynML, `simt/` explicit kernels; `words/` are the names users write inside kernels.
"""
