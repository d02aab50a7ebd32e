"""simulate(deployment, workload, seed) → Run, and how sure a run is of itself."""
