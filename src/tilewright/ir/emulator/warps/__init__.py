"""The thread stage of the emulator: warps, their scheduler, barriers, shuffles, copies and matrix instructions; stepping through one thread."""
