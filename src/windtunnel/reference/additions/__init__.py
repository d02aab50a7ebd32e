"""What few of vLLM's servers turn on: drafts, and inputs that an encoder reads."""
