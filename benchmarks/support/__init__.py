"""Helpers that benchmarks share."""
