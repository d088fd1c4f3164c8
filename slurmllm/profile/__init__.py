"""Profiles of training steps: traces, the time by part, and which worker waits for which."""
