"""vLLM's first engine: its scheduler, the passes of a step, and its blocks."""
