"""Ordered loops at the thread stage: several steps at a time, and all steps as one kernel."""
