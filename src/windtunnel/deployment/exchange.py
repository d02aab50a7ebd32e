"""Exchange: the names of the ways in which ranks send tokens to each other's experts."""

GATHERED = "allgather_reducescatter"
"""Every rank sees the tokens of all, and the sums of its experts are scattered."""
LOW_LATENCY, HIGH_THROUGHPUT, AUTO = "deepep_low_latency", "deepep_high_throughput", "deepep_auto"
BACKENDS = (GATHERED, LOW_LATENCY, HIGH_THROUGHPUT, AUTO)
"""vLLM's names (config/parallel.py); ``deepep_auto`` is SGLang's ``--deepep-mode auto``: low latency for decodes, high
throughput for prompts."""
