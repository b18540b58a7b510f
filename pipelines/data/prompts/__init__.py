"""Stage 1: import prompts."""
