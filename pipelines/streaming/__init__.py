"""One response, piece by piece, for the terminal and the endpoint."""
