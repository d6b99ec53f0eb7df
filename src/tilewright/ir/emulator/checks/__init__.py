"""What the emulator finds wrong: races of warps, threads and blocks, and accesses nothing orders."""
