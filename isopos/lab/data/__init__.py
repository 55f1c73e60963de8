"""Data of tasks: sources of text, trees, images and time series, tokenizers, splits, and the cache."""
