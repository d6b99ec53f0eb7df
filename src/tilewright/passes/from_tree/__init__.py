"""Typed tree to the loop stage. In: typed kernels, or blocks of a pipeline. Out: one program of loop nests."""
