"""Measurements of the operations beside others': interleaved, with their spread. Figures are rows, never tests."""
