"""Prefill and decode apart: what may be deployed, DistServe's placement, and whether it beats servers that do both."""
