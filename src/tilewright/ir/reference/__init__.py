"""What functions mean that NumPy has not, on NumPy arrays."""
