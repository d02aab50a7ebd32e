"""Estimators: small models that are trained on a few measured times of an operator and predict all others."""
