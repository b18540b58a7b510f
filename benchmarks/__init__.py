"""Benchmarks of the store, of decoding and of all methods."""
