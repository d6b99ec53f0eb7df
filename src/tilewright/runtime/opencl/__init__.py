"""OpenCL devices, through pyopencl: memory, queues, events, programs of SPIR-V."""
