"""Memory of the emulator: arrays as flat runs of elements, atomic updates, a CPU's matrix panels."""
