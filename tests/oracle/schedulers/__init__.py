"""Schedulers, request by request."""
