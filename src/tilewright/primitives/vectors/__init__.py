"""Sorts by vectors, for CPUs that have wide ones and compress them: networks in registers, quicksort, rows and whole arrays."""
