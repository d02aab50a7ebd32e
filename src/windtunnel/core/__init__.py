"""The engine room: each scheduler's rules written once, compiled or as plain Python, and equal steps made at once.

``docs/architecture.md`` explains it.
"""
