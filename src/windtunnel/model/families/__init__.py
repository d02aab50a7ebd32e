"""Families: what an architecture fixes in its code, calls by another name, or has layers of its own for."""
