"""From Python functions to machine code, and the call of machine code that is kept."""
