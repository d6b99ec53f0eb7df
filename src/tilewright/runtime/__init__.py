"""Loads artifacts and runs them. Never sees IR, never compiles. In: artifacts and arrays. Out: results in memory.

`core/` is for every device, `memory/` arrays and pools, `cpu/` and `cuda/` devices, `exchange/` arrays of other libraries.
"""
