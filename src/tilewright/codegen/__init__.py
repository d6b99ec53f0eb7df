"""Thread-stage IR to LLVM text, and LLVM text to code. Never touches a device.

`llvm/` is shared, `cpu/` and `nvptx/` are dialects, `host/` is the machine code around kernels.
"""
