"""How damage and loss are found, and garbage removed."""
