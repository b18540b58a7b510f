"""The workspace of one target, local or at a URL."""
