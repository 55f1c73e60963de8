"""Tasks: what a sample, a model, a loss and a metric is."""
