"""InferMax (arXiv 2411.07447) as an experiment: ``python -m benchmarks.infermax`` writes docs/infermax.md."""
