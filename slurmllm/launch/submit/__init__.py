"""From a recipe to a run directory and its Slurm jobs."""
