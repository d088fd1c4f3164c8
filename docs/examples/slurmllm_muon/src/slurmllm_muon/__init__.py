"""An example of a plugin of slurmllm: the Muon optimizer, and a hook that logs per-layer norms."""
