"""Which estimator predicts operators best, and what the source documents claim about them, measured."""
