"""Kernels of the ops of tensor graphs, in plain loops."""
