"""Structs of numbers: how they lie in memory (`layout`), and kernels with them as kernels of their fields (`split`)."""
