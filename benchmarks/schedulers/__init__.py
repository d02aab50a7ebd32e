"""Claims about schedulers as experiments: ``python -m benchmarks.schedulers`` writes docs/experiments/schedulers.md."""
