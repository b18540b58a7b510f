"""Serve a target, with or without a drafter: chat completions as in the OpenAI API, and a page."""
