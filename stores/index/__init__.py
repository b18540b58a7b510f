"""The index of a store: one Arrow row per sample."""
