"""Fit drafters to a feature store."""
