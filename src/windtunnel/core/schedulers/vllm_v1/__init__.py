"""Parts of vLLM's v1 scheduler: who is admitted, and what few servers turn on: adapters, images, intervals, drafts."""
