"""Layers with windows: pairs, work and memory, against masks, torch's counter, what is kept."""

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from slurmllm.core.config.resolve import RunConfig, resolve
from slurmllm.plan.memory import StepMemory
from slurmllm.plan.mesh import make_mesh
from slurmllm.plan.parameters import (
    attention_flops,
    attention_pairs,
    block_products,
    head_product,
    layer_windows,
    model_flops,
)
from slurmllm.train.model.attention import document_mask
from slurmllm.train.model.decoder import build_model
from slurmllm.train.model.init import initialize

FAMILIES = ["llama"]
LENGTH = 128


def small(family: str, *settings: str) -> RunConfig:
    return resolve(f"tiny_{family}", "local", ["train.compile=false", *settings])


@pytest.mark.parametrize("window", [1, 2, 31, 32, 127, 128])
def test_pairs_are_those_of_the_mask(window: int) -> None:
    mask = document_mask(torch.arange(LENGTH).unsqueeze(0), torch.float32, window)
    allowed = int((mask == 0).sum())
    assert attention_pairs(LENGTH, window) == (2 * allowed - window) // 2


@pytest.mark.parametrize("family", FAMILIES)
def test_work_is_what_torch_counts(family: str) -> None:
    """Products as they are; of attention torch counts all pairs, and the model those of windows."""
    model = small(family).recipe.model
    decoder = build_model(model)
    initialize(decoder, model, seed=1)
    tokens = torch.randint(0, model.vocab_size, (2, LENGTH))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        decoder(tokens)
    count = model.num_layers
    products = [*block_products(model, 2 * LENGTH, 1)] * count
    dense = sum(product.flops for product in products)
    dense += head_product(model, 2 * LENGTH, 1).flops
    all_pairs = count * attention_flops(model, 2 * LENGTH, 1, LENGTH**2)
    assert counter.get_total_flops() == dense + all_pairs
    share = sum(layer_windows(model)) / (count * LENGTH)
    assert model_flops(model, 2) == pytest.approx(3 * (dense + share * all_pairs))


def kept(config: RunConfig, positions: Tensor | None) -> int:
    """Bytes that a forward pass keeps, without parameters and tables of rotary positions."""
    model = build_model(config.recipe.model)
    initialize(model, config.recipe.model, seed=1)
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.randint(0, config.recipe.model.vocab_size, (4, LENGTH))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = model(tokens, positions=positions)
    del logits
    return sum(sizes.values())


@pytest.mark.parametrize("mask", ["none", "document"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_blocks_keep_is_what_is_planned(family: str, mask: str) -> None:
    config = small(family, f"data.mask={mask}", "train.micro_batch=4")
    positions = None
    if mask == "document":
        positions = torch.cat([torch.arange(40), torch.arange(LENGTH - 40)]).expand(4, -1)
    memory = StepMemory(config, make_mesh(config, 1), 0)
    # And the head's input.
    planned = memory.activations() + memory.masks() + memory.gathered
    assert kept(config, positions) == pytest.approx(planned, rel=0.02)
