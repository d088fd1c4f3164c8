"""A run on many nodes for a month, simulated in seconds; its `RunHistory` is that of a real run."""
