"""vLLM's v1 scheduler as plain objects, request by request, with what the core lacks: drafts and encoder inputs."""
