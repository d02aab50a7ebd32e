"""Optimum: how far a schedule is from the best possible one, with what proof."""
