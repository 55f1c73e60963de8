"""Text: where it comes from, how it becomes tokens, and where those are kept."""
