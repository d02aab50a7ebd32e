"""Parity with Vidur: its runs again on the oracle, with its tables and its scheduler's rules."""
