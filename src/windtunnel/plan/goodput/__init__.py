"""Goodput per GPU or dollar at the arrivals that a load has: nothing is scaled, and the number of replicas is found."""
