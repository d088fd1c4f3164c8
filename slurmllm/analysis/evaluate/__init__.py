"""`slurmllm evaluate`: scores of checkpoints in suites of tasks, and their validation loss."""
