"""What the runtimes of OpenCL and Vulkan share: pooled memory, copies, programs, reports of kernels, waits that end."""
