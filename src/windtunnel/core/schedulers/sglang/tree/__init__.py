"""The tree of prefixes of SGLang's lanes: its nodes, what is evicted of it, and host memory behind it."""
