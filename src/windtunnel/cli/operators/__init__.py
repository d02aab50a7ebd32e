"""operators: commands that measure them, and that learn their times."""
