"""The schedulers object by object: the readable specification, and the oracle of ``windtunnel.core``."""
