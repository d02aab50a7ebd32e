"""TensorRT-LLM's scheduler: who fits memory (``capacity``), who takes part (``batch``), and the loop around both (``executor``)."""
