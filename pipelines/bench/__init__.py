"""Stage 5: decode held-out prompts, measure, and keep every number."""
