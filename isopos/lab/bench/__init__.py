"""Benchmarks of one's own machine: interleaved timings with their spread. Figures are rows, never tests."""
