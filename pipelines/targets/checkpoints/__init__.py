"""A target's checkpoint: found by name, identified, described and loaded."""
