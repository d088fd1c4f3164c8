"""What became of a run's node hours: read from its records, or simulated."""
