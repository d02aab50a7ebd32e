"""Does a preset still decide as the real engine does? Random workloads through both, step by step."""
