"""Carry: the feature store, its schema, and the errors every layer above raises."""
