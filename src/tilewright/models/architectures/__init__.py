"""Descriptions of networks, one file for each architecture: a function of a `Network` that gives the last hidden rows."""
