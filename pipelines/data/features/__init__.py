"""Stage 3: capture the target's features into the store."""
