"""Disaggregated prefill and decode: what may be deployed, DistServe's placement, and whether it pays."""
