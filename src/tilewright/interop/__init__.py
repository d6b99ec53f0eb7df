"""Kernels inside PyTorch, JAX and notebooks. In: a kernel or a cell. Out: an operator, a function, a result."""
