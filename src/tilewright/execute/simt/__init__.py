"""Launches of explicit kernels: arguments, block and grid shapes, and the launch on each kind of device."""
