"""slurmllm: from one line on a Slurm cluster to a trained, requeued and compared language model."""

__version__ = "0.1.0"
