"""What a stage will cost, what the machine has, and what a workspace still needs."""
