"""The stock model of transformers: runs any family, and is the reference of the self-test."""
