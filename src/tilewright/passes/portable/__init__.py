"""The end of the thread stage for GPUs that lack something: warps, vectors, float atomics, 64-bit integers."""
