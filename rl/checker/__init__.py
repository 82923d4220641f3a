"""A program that marks arithmetic in place of an LLM judge: what `[endpoints]` of kind "checker" start."""
