"""One call of a kernel: arguments read and checked, sizes bound, outputs made, the run on a host or on a device with memory of its own."""
