"""TensorRT-LLM's scheduler: ``executor`` is the loop around who fits memory and who takes part."""
