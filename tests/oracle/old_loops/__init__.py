"""The three loops that ``core.loop`` took the place of, to compare it with."""
