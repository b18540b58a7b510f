"""What makes files count, and how damage and loss are found."""
