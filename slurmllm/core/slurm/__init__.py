"""Slurm: commands, job arrays, `cluster.setup` and containers."""
