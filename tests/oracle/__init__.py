"""Second ways to simulate, which tests compare the core with."""
