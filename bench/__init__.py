"""Side-by-side benchmarks: Tilewright and its peers in one process, on the same data, each result checked before it is timed."""
