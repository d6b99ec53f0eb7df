"""Functions that kernels offer beside operators: what each builds, of typed operands."""
