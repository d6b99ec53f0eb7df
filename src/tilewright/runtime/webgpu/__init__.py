"""WebGPU devices through wgpu-py."""
