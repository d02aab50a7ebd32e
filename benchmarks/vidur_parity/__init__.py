"""Parity with Vidur: its runs again on the reference engine, with its tables and its scheduler's rules."""
