"""Primitives on GPUs whose blocks cannot wait for each other: several launches, and threads that walk a few neighbours each."""
