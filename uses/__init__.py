"""The uses of a model: label, tune, classify, extract and simulate, each with all that it consists of."""
