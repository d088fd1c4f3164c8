"""An example of a plugin of slurmllm: an optimizer, and a hook that logs per-layer norms."""
