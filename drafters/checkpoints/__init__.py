"""Trained drafters on disk: settings, weights, and export to serving engines."""
