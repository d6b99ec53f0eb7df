"""What every layer shares: errors, source spans, dtypes, symbolic sizes, targets, artifacts and the binary interfaces of generated code.

In: nothing of this package. Out: small immutable records. Nothing here knows a kernel.
"""
