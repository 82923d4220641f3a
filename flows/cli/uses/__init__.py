"""Commands for the uses of a model."""
