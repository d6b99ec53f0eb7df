"""What passes of several stages use: simplification, combination of partial results, registers of a thread."""
