"""Profiling: measure the operators of a model on the machine in front of you, with torch."""
