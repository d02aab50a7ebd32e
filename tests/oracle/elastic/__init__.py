"""Replicas that start, drain, fail and come back: in one pool (``mixed``), or in pools apart (``apart``)."""
