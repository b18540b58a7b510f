"""Stage 5: decode held-out prompts, measure, compare and report."""
