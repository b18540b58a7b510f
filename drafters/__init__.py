"""Drafters: one file per method; what they share, their training and decoding are in subfolders."""
