"""Compute blocks that have not run: arrays that know their shape, and the blocks that will fill them, compiled together."""
