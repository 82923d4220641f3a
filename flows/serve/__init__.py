"""The server of a checkpoint: an OpenAI-compatible API over HTTP, batched across requests."""

SLOTS, QUEUE = 16, 128  # unless the options say otherwise; the programs for so many are compiled ahead
