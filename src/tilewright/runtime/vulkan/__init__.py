"""Vulkan devices, through the package `vulkan`: memory by address, one queue, events, programs of SPIR-V."""
