"""Constraint programs: optimal schedules of few requests, by OR-Tools."""
