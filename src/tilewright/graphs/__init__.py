"""Tensor graphs: nodes of named ops, planned as programs and run on any device.

`graph.py` builds them, `registry.py` says what each op is, `plan.py` makes programs of a graph, `executor.py` runs them.
"""
