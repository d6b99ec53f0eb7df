"""Nests of loops to tiles: the parts of `lower_loops`. In: parts of a nest. Out: tile-stage ops of one block."""
