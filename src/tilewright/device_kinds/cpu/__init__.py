"""The CPU as a kind of device: calls of kernels, launches of explicit kernels, primitives."""
