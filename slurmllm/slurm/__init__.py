"""Slurm: `client.py` runs its commands, `fake.py` imitates it, `arrays.py` submits job arrays."""
