"""NVIDIA GPUs as a kind of device: finding them, and the machine code that takes calls the general path has shown it."""
