"""Produce: Ray pipelines from prompts to a report, and the target VLMs they run."""
