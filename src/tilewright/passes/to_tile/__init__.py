"""Loop stage to tile stage. In: a kernel and its schedule. Out: what one block computes, over tiles of static shape."""
