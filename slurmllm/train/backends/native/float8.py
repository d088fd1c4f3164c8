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
from dataclasses import replace

import torch
from torch import nn

from slurmllm.core.config.recipe import TrainConfig
from slurmllm.train.backends.native.device import Device
from slurmllm.train.backends.native.environment import missing_torchao

# Compute capability from which on torch._scaled_mm has the kernels (torch 2.13).
_CAPABILITY = {"tensorwise": (8, 9), "rowwise": (9, 0)}
# Loggers that warn of libraries for other products, of torchao's enums, and with tensor parallelism
# of the order of a sum, which is a maximum.
_WARN_FOR_NOTHING = ("torchao", "torch.utils._pytree", "torch.distributed.tensor._redistribute")


def device_fault(train: TrainConfig, device: Device) -> str | None:
    """Return why this worker cannot multiply in fp8; None if it can."""
    if fault := missing_torchao():
        return fault
    if device.torch.type == "cpu":
        return None
    needed = _CAPABILITY[train.fp8_recipe]
    capability = torch.cuda.get_device_capability(device.torch)
    if torch.version.hip is None and capability >= needed:
        return None
    return (
        f"train.precision: fp8_mixed: train.fp8_recipe {train.fp8_recipe} needs an NVIDIA GPU of "
        "compute capability {}.{} or later, and this is {} of {}.{}; --set "
        "train.precision=bf16_mixed, or use other nodes"
    ).format(*needed, torch.cuda.get_device_name(device.torch), *capability)


def convert_products(
    block: nn.Module, train: TrainConfig, device: Device, shards: int | None
) -> None:
    """Have the linear layers of a block, on meta and not yet parallel, multiply in fp8.

    Names of modules and parameters stay. `shards`: how many workers will share a matrix by FSDP and
    tensor parallelism; None without FSDP.
    """
    for name in _WARN_FOR_NOTHING:
        logging.getLogger(name).setLevel(logging.ERROR)
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

    precompute_float8_dynamic_scale_for_fsdp(model)
