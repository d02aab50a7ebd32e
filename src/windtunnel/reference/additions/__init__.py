"""What few of vLLM's servers turn on, beside its scheduler: drafts, and inputs that an encoder reads."""
