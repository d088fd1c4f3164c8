"""Matrix size against utilization: the share of a device's peak that products reach."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slurmllm.calibrate.fits import product_flops
from slurmllm.calibrate.node import PRODUCT_SIZES, Sample, product_grid
from slurmllm.calibrate.run import run_task, task_of
from slurmllm.config.cluster import Hardware
from slurmllm.config.resolve import RunConfig
from slurmllm.plan.flops import Product
from slurmllm.plan.step import product_s
from slurmllm.supervise.allocation import LocalAllocation

_BYTES = {"bf16": 2, "fp32": 4}


def is_device_here(config: RunConfig, root: Path = Path("/")) -> bool:
    """Whether this machine has a device of the profile that can be measured."""
    device = config.cluster.device
    # The driver's device files; NeuronCores are not measured.
    return device == "cpu" or (device == "cuda" and any(root.glob("dev/nvidia[0-9]*")))


def measure_products(config: RunConfig, show: Callable[[str], None]) -> list[Sample]:
    """Measure matrix products, forward and both gradients, with one worker on this machine.

    Raises:
        NodeError: the measurement failed.
    """
    allocation = LocalAllocation()
    only = {"workers": 1, "sharing": 1, "products_only": True}
    task = task_of(config, allocation, quick=False).model_copy(update=only)
    samples, _ = run_task(config.cluster, task, allocation, show)
    return [sample for sample in samples if sample.kind == "product"]


def predicted_products(hardware: Hardware, device: str) -> list[dict[str, Any]]:
    """What products in bf16 reach of the peak, by the planner's curve."""
    sizes = product_grid(*PRODUCT_SIZES["cpu" if device == "cpu" else "cuda"])
    return [_row(hardware, "bf16", size, None) for size in sizes]


def measured_products(hardware: Hardware, samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """The same as measured, in both precisions, with the planner's curve."""
    largest = max(sample.sizes[0] for sample in samples)
    shown = [s for s in samples if s.sizes[0] == largest]  # without the head
    return [
        _row(hardware, s.of, s.sizes, product_flops(s) / s.value / 1e12)
        for s in sorted(shown, key=lambda s: (s.of, s.sizes))
    ]


def _row(
    hardware: Hardware, precision: str, sizes: Sequence[int], measured: float | None
) -> dict[str, Any]:
    m, n, k = sizes
    peak = hardware.bf16_tflops if precision == "bf16" else hardware.fp32_tflops
    # The product, and the gradients of its factors.
    products = (Product(m, n, k), Product(m, k, n), Product(k, n, m))
    seconds = sum(product_s(one, peak * 1e12, _BYTES[precision], hardware) for one in products)
    planner = sum(one.flops for one in products) / seconds / 1e12
    return {
        "precision": precision,
        **{"m": m, "k": k, "n": n},
        "peak_tflops": peak,
        "planner_tflops": planner,
        "planner_utilization": planner / peak,
        "measured_tflops": measured,
        "measured_utilization": None if measured is None else measured / peak,
    }
