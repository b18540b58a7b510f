"""Benchmarks of the store, of decoding and of all methods."""

import sys


def say(text: str) -> None:
    """A line about the progress, on stderr."""
    sys.stderr.write(text + "\n")
