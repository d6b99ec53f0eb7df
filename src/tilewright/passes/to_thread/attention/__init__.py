"""Attention at the thread stage: two products with a running maximum between them, by `wgmma` or `mma`."""
