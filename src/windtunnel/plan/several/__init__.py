"""Several at once: loads that one deployment must serve, and models among which one is chosen."""
