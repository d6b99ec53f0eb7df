"""Functions as arithmetic, by kind: inverse ones, roots, error and gamma functions, and those that look at bits. `expand_math` lists them."""
