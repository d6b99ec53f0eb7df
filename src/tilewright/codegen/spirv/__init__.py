"""SPIR-V for OpenCL and Vulkan, by an emitter and an assembler of our own."""
