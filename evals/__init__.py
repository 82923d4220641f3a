"""Benchmarks, graders and scores for any model (paper §5), as plain functions over records, replies and rows."""
