"""`slurmllm init`: what Slurm and this machine tell of a site, and the profile made of it."""
