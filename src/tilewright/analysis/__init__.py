"""Questions about IR. In: a kernel or an op. Out: facts: affine indices, ranges, divisors, aliasing, contractions. Nothing is rewritten."""
