"""Packed blocks of quantised numbers: how they lie in memory, and how NumPy arrays become them and come back."""
