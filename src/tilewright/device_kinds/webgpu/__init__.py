"""WebGPU devices as a kind."""
