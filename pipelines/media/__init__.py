"""Find, check and read images and videos."""
