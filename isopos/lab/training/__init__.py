"""One run from start or checkpoint to result."""
