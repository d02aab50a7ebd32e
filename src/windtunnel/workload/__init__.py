"""Workloads: what arrives when, how long it is, and where it comes from."""
