"""Lossless speculative decoding."""
