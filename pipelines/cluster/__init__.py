"""Ray workers and training processes."""
