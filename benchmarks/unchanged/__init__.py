"""Whether a change that must not move any figure moves one."""
