"""Spikes of the loss after HLAT, with the trends of the norms and of the running mean."""

from slurmllm.spikes.analysis import Spike, SpikeAnalysis
from slurmllm.spikes.detection import find_spikes

__all__ = ["Spike", "SpikeAnalysis", "find_spikes"]
