"""Passes that give sums over windows one form: conditions joined, strided ones cut into phases."""
