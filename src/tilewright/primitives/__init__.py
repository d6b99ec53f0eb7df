"""Scan, sort, filter, histogram and the like for whole arrays. In: dtypes and functions of numbers. Out: thread-stage programs."""
