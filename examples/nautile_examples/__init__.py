"""Parts from outside for Nautile, one a file."""
