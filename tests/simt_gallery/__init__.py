"""A gallery of explicit kernels with one bug each, and of the same kernels without it."""
