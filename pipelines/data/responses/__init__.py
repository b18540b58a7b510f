"""Stage 2: generate and keep the target's responses."""
