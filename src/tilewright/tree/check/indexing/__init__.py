"""Indices that are more than one number for each axis."""
