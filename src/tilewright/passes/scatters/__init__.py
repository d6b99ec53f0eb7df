"""Scatters, which combine numbers at places that data decides: what comes before them apart, parts that run side by side, and how a GPU holds what is combined."""
