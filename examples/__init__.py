"""Examples that use the package; they are not installed. Run them from the root of the repository."""
