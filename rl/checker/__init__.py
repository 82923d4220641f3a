"""A deterministic checker of arithmetic that stands in for an LLM judge: the server of endpoints of kind "checker"."""
