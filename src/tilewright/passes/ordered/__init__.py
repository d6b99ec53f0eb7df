"""Ordered loops at the thread stage: several steps at a time, all steps as one kernel, and turns that wait for the one before."""
