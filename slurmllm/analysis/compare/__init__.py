"""Comparison of two or more curves."""
