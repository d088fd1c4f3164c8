"""Training through PyTorch itself, on CPUs and NVIDIA GPUs."""
