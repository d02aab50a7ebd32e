"""A server that answers as the simulated deployment would, what records one, and what watches a load."""
