"""Results of which a triangle is wanted, or is enough: symmetric products, loops and conditions that end at the diagonal."""
