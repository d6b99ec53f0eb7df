"""How the kernels of a program are launched: which of them together, and which before the one before them has ended. Thread stage."""
