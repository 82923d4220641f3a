"""Pages about what the store holds: lineage and sizes."""
