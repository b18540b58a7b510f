"""Think: one file per drafter, and the machinery that trains them and decodes with them."""
