"""Runs made again: a trace of calls, code that makes them anew, graphs of GPUs, and the cache of these."""
