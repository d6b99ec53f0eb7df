"""The kernel IR: one set of nodes at three stages (loop, tile, thread), its op table, text form, verifier, emulator and shrinker.

In: what passes and tests build. Out: the same, printed, parsed, verified or executed. The IR knows no target's code.
"""
