"""The version of windtunnel, alone in a module so that every other one can import it."""

__version__ = "0.1.0"
