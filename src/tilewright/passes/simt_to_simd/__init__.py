"""Explicit kernels on CPUs: threads of a block become lanes of SIMD registers, barriers become the ends of loops."""
