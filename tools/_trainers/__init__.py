"""Trainers of other projects, each run, killed, resumed, compared and drilled (`make trainers`)."""
