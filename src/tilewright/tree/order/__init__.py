"""The order of iterations: which loops can run in any, and what loops that cannot hand from step to step. In: typed loops; out: proofs, other loops."""
