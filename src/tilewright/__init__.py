"""Tilewright: one kernel source, checked once, fast on every device."""
