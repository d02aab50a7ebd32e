"""Validation: simulations beside what real engines measured. Definitions: docs/accuracy.md."""
