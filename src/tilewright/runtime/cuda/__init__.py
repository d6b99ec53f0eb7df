"""NVIDIA GPUs: the driver, memory, copies, streams, launches and graphs."""
