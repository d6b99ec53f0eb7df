"""LLVM text for CPUs: SIMD, atomics, matrix units, printing."""
