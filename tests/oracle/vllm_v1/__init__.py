"""vLLM's v1 scheduler as plain objects, request by request, written independently of the core."""
