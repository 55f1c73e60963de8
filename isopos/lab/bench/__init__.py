"""Benchmarks of the user's machine: interleaved timings with their spread. Figures are rows, never tests."""
