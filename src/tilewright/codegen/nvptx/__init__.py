"""LLVM text for NVIDIA GPUs, and `ptxas`: tensor cores, copy engines, cache hints, warps, reports of a kernel."""
