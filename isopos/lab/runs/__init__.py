"""A run's folder: its files, checkpoints and locks."""
