"""The scheduler of vLLM v1 as plain objects."""
