"""Speak: one file per verb of the command line."""
