"""Validation: simulations against what real engines measured. Definitions: docs/accuracy.md."""
