"""The whole loop against an engine that others wrote: vLLM on this machine's CPU."""
