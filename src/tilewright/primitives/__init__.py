"""Device-wide primitives (scan, filter, sort, histogram, transpose…) as programs of the kernel IR, built at the thread stage."""
