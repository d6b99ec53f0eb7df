"""Which schedule a kernel gets: candidates, cost models, and the author's wishes. Stands above the lowerings, which say what fits."""
