"""windtunnel: simulate LLM inference serving request by request."""

__version__ = "0.1.0"
