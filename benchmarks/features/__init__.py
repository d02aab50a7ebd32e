"""What each feature costs with each engine."""
