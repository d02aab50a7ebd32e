"""Tests of benchmarks.vidur_parity."""
