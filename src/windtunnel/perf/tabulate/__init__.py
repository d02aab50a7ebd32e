"""Tabulate: the operators of a pool, asked at the knots of its tables, and the tables of the answers."""
