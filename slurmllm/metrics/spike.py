"""The definition of a spike, which `slurmllm spikes` and the guard of training share.

A step is in a spike if its value is above a limit that a running mean of earlier steps sets, as AWS
defines it for the gradient norm of HLAT (Fan et al. 2024, arXiv 2404.10630). `slurmllm spikes`
counts all of them: more than a height above the mean of the steps just before. The guard looks for
those that may not return: more than a multiple of the lowest such mean of a longer time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from slurmllm.metrics.curves import Floats

Value = TypeVar("Value", float, "Floats")


def spike_height(value: Value, mean: Value, factor: float = 1.0) -> Value:
    """Return `value - factor * mean`, which is positive in a spike; `mean` is the running one."""
    return value - factor * mean
