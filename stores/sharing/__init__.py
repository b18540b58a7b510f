"""Merge, push and pull."""
