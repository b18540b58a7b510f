"""Decode with a drafter, losslessly."""
