"""Random kernels against an independent reference: `python -m tests.fuzz.random_kernels`, `make fuzz`.

    model       a kernel as data: dtypes, expressions, statements, inputs
    draw        a kernel from a seed
    steps       ordered loops, arrays in place and running sums for it
    explicit    an explicit kernel from a seed
    source      the kernel as Python text
    arithmetic  what docs/numerics.md says of numbers, with how far results may be off
    reference   what the kernel computes, without any of Tilewright's code
    memory      inputs in hostile layouts, between guard pages
    trial       one kernel on one device, compared
    batches     many seeds in child processes that may crash or hang
    shrink      a failure made small, and kept as a case
    cards       cubins built here and run on a GPU elsewhere
"""
