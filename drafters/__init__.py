"""Drafters: one file per method; shared parts, training and decoding are in subfolders."""
