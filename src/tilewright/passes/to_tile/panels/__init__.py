"""Products on a CPU: copies of factors in panels, factors read where they lie, and what is done with sums."""
