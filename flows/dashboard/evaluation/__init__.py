"""Pages about what a model can do: benchmarks."""
