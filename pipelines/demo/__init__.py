"""Generates the prompts of the demo targets: scenes, clips, and questions with reference responses."""
