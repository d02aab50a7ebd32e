"""Parts of vLLM's v1 scheduler that few servers turn on: adapters, intervals between prompts, and speculation."""
