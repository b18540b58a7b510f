"""The stock model of transformers: the forward pass of any family, and what a target is checked against."""
