"""Factors as sums of several numbers of a narrower type, which matrix units multiply."""
