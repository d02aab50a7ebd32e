"""Plain objects, step by step: vLLM v1 and the unified algorithm a second time, the oracle of ``windtunnel.core``.

The schedulers that users write in Python run here, too.
"""
