"""Figures of published posts, from small runs of this machine (docs/developing/reproduce.md)."""
