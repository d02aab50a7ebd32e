"""Requests that nothing is known of before they come: what a server needs that answers while it simulates."""
