"""Tests of perf.estimators."""
