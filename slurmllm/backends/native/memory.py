"""How much memory a worker used at most, and how much it may use, of its GPU."""

from __future__ import annotations

import torch

from slurmllm.backends.base import Memory


def device_memory(device: torch.device) -> Memory:
    """A GPU's, from the allocator's own count; counting starts anew."""
    peak = torch.cuda.max_memory_allocated(device)
    # What others hold (NCCL, the CUDA context) is in neither of the two.
    free, _ = torch.cuda.mem_get_info(device)
    limit = free + torch.cuda.memory_reserved(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return Memory(peak, limit)
