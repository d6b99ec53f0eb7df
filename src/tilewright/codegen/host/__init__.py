"""Machine code around kernels: CPython entries, launch stubs, the allocator, the thread pool, shared libraries."""
