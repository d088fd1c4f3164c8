"""The blocks' matrix products in fp8, by torchao's float8 training.

A layer's parameters stay what they are: both operands of a product are scaled and converted to fp8
before it, and the result is bf16. On CPUs torchao emulates the products in fp32. Scales are those
of the tensors at hand, so there is no state: a resumed run computes as an uninterrupted one.

With scales of whole tensors FSDP gathers the weights in fp8, converted from fp32 without bf16
between; then each parameter's shard is wrapped by torchao (`local_part` takes it out). Others are
gathered in bf16.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from slurmllm.core.config.recipe import TrainConfig
from slurmllm.train.backends.native.device import Device
from slurmllm.train.backends.native.environment import missing_torchao

# Compute capability from which on torch._scaled_mm has the kernels (torch 2.13).
_CAPABILITY = {"tensorwise": (8, 9), "rowwise": (9, 0)}


def device_fault(train: TrainConfig, device: Device) -> str | None:
    """Return why this worker cannot multiply in fp8; None if it can."""
    if fault := missing_torchao():
        return fault
    if device.torch.type == "cpu":
        return None
    name = torch.cuda.get_device_name(device.torch)
    fix = "--set train.precision=bf16_mixed, or take other nodes"
    if torch.version.hip is not None:
        return f"train.precision: fp8_mixed is for NVIDIA's GPUs and CPUs, not for {name}; {fix}"
    capability = torch.cuda.get_device_capability(device.torch)
    needed = _CAPABILITY[train.fp8_recipe]
    if capability >= needed:
        return None
    return (
        f"train.precision: fp8_mixed: train.fp8_recipe {train.fp8_recipe} needs a GPU of compute "
        f"capability {needed[0]}.{needed[1]} or later, and {name} has "
        f"{capability[0]}.{capability[1]}; {fix}"
    )


def convert_products(
    block: nn.Module, train: TrainConfig, device: Device, shards: int | None
) -> None:
    """Have the linear layers of a block, on meta and not yet parallel, multiply in fp8.

    Names of modules and parameters stay. `shards`: how many workers will share a matrix by FSDP and
    tensor parallelism; None without FSDP.
    """
    with _quiet("torchao", "torch.utils._pytree"):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    recipe = Float8LinearConfig.from_recipe_name(train.fp8_recipe)
    tensorwise = train.fp8_recipe == "tensorwise"

    def is_gathered(module: nn.Module) -> bool:
        # CAUTION: where a worker would have fewer rows than another, FSDP raises on some workers,
        # and the others wait for them (torch 2.13).
        assert isinstance(module, nn.Linear)
        return tensorwise and shards is not None and module.out_features % shards == 0

    def convert(gathered: bool) -> None:
        convert_to_float8_training(
            block,
            module_filter_fn=lambda module, name: is_gathered(module) == gathered,
            config=replace(
                recipe, emulate=device.torch.type == "cpu", enable_fsdp_float8_all_gather=gathered
            ),
        )

    convert(gathered=False)
    if tensorwise:
        convert(gathered=True)


def compute_scales(model: nn.Module) -> None:
    """Compute the scales of the weights that FSDP gathers in fp8 (one collective for all).

    Before each forward pass after a change of the weights. Without it, FSDP would compute each by
    a collective of its own, over the data-parallel workers alone.
    """
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    # With tensor parallelism DTensor warns of the order of sums, which a maximum does not have.
    with _quiet("torch.distributed.tensor._redistribute"):
        precompute_float8_dynamic_scale_for_fsdp(model)


@contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Let these loggers pass on errors only."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
