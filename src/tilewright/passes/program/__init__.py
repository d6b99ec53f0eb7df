"""Program to program: kernels fused, split, added before or after; arrays between them placed."""
