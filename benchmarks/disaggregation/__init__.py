"""Disaggregated prefill and decode: what DistServe and its readers claim, and what simulations of it show.

``python -m benchmarks.disaggregation`` writes docs/experiments/disaggregation.md and its charts.
"""
