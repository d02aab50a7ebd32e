"""Manifests: what starts a fleet elsewhere than from scripts: containers, units, and the objects of clusters."""
