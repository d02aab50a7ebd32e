"""Profiles: times of operators that were measured on one device, as sources of batch times."""
