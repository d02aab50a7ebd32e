"""Replicas that start, drain, fail and come back, in plain Python on the records of the core."""
