"""Tile stage to thread stage. In: tiles with layouts. Out: what one thread executes. Matrix products and attention have folders of their own."""
