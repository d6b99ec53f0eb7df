"""Typed tree to IR, and IR to IR. `pipeline.py` holds every order of passes, `routes.py` takes programs through them; the folders hold the passes by what they turn into what.

In: a typed tree. Out: thread-stage IR that a code generator takes.
"""
