"""Serving engines: what they load, run in processes and environments of their own."""
