"""Stages 1 to 3: prompts, responses and features."""
