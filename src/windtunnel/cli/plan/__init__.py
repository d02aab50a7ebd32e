"""plan: the cheapest deployment that keeps the limits: its flags, the command, and what it shows."""
