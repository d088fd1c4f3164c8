"""Checkpoints judged: suites of tasks, held-out loss, and what they scored."""
