"""Families of kernels: ordinary code, drawn at random from stated ranges, held against the best peer. `python -m bench.run families --seed 1`."""
