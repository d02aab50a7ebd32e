"""Tests of benchmarks.real_engine."""
