"""The papers' claims and searches for better methods; performance is in `benchmarks`."""

import sys


def say(text: str) -> None:
    """A line about the progress, on stderr."""
    sys.stderr.write(text + "\n")
