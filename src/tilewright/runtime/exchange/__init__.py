"""Arrays of other libraries without a copy: DLPack, PyTorch, CuPy, JAX."""
