"""Slurm: `client.py` talks to it, `fake.py` stands in for it, `render.py` writes batch scripts."""
