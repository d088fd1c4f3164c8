"""After the run: read its metrics, compare it with another run. No torch, no Slurm."""
