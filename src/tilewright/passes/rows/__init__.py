"""Rows and sums of several axes on a GPU."""
