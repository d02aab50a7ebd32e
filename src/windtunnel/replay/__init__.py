"""Replay a recorded workload through a scheduler of the reference, and write the same step records as the recorder."""
