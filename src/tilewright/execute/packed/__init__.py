"""Packed arrays for users: making them, unpacking them, and groups as ONNX has them."""
