"""Spikes of the loss after HLAT, and what the norms and the lowest loss say beside them."""

from slurmllm.spikes.analysis import Spike, SpikeAnalysis
from slurmllm.spikes.detection import find_spikes

__all__ = ["Spike", "SpikeAnalysis", "find_spikes"]
