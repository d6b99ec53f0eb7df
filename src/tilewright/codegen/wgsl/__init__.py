"""WGSL, the shading language of WebGPU, from thread-stage IR."""
