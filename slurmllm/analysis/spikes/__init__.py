"""Spikes of the loss and of the gradient norm, with the trends of the norms and running means."""

from slurmllm.analysis.spikes.analysis import Spike, SpikeAnalysis
from slurmllm.analysis.spikes.detection import analyze

__all__ = ["Spike", "SpikeAnalysis", "analyze"]
