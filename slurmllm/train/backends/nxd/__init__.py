"""Training through neuronx-distributed on Trainium."""
