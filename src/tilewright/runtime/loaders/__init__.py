"""Source of the Python files that `tilewright export` writes. These modules import nothing of Tilewright: their text is copied."""

DRIVER_API = "the CUDA driver API"
"""What launches exported code for GPUs."""
