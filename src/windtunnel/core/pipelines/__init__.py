"""Steps that pass through several stages."""
