"""The data loader: seeded epochs of packed batches."""
