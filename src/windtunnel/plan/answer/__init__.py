"""The answer of a search: which of equals wins, and what to say about it."""
