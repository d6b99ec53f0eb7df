"""Arrays in device memory and the pools they come from."""
