"""Tests of perf.profile."""
