"""Pages about what makes a model: curves, texts, rollouts, distillation."""
