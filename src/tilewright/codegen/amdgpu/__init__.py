"""AMD GPUs, through LLVM: thread-stage IR -> code objects of gfx90a, gfx942, gfx1100 and gfx1201."""
