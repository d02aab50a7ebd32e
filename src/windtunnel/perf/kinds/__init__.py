"""Kinds of kernels: one file says everything about one of them."""
