"""A worker's memory: the peak since the last look, and what it may use."""

from __future__ import annotations

import torch

from slurmllm.core.run.host_memory import host_memory

SIZE = 2**27


def test_the_peak_is_counted_anew() -> None:
    before = host_memory(1)
    torch.ones(SIZE, dtype=torch.uint8).sum()
    peak = host_memory(1).peak_bytes
    assert peak > before.peak_bytes - SIZE / 8
    after = host_memory(1).peak_bytes
    assert peak - after > SIZE / 2, "freed, and not counted any more"


def test_workers_share_the_machine() -> None:
    alone, among_four = host_memory(1), host_memory(4)
    assert 0 < among_four.peak_bytes < among_four.limit_bytes <= alone.limit_bytes / 2
