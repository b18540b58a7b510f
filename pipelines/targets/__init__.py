"""Target VLMs, one file per family."""
