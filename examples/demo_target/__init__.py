"""How the embedded targets are made: their curriculum, wired heads, training and scores."""
