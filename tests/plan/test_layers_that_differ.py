"""Layers with windows: pairs, work and memory, against masks, torch's counter, what is kept."""

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from slurmllm.core.config.resolve import RunConfig, resolve
from slurmllm.plan.memory import StepMemory, dense_mask_warning
from slurmllm.plan.mesh import make_mesh
from slurmllm.plan.neuron_memory import neuron_memory
from slurmllm.plan.parameters import (
    attention_flops,
    attention_pairs,
    block_products,
    head_product,
    layer_windows,
    model_flops,
)
from slurmllm.plan.step import step_time
from slurmllm.train.model.attention import document_mask
from slurmllm.train.model.decoder import build_model
from slurmllm.train.model.init import initialize

FAMILIES = ["llama", "mistral", "smollm3", "olmo3", "gemma3", "nanochat"]
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
    plain = ("model.logits_softcap=null", "train.micro_batch=4")  # the cap is in the loss
    config = small(family, f"data.mask={mask}", *plain)
    positions = None
    if mask == "document":
        positions = torch.cat([torch.arange(40), torch.arange(LENGTH - 40)]).expand(4, -1)
    memory = StepMemory(config, make_mesh(config, 1), 0)
    # And the head's input.
    planned = memory.activations() + memory.masks() + memory.gathered
    assert kept(config, positions) == pytest.approx(planned, rel=0.02)


def attention_s(recipe: str, cluster: str, *settings: str, nodes: int = 1) -> float:
    """Seconds of a step's attention: what longer windows add to those of one token."""
    base = ("parallel={auto: false}", "train.micro_batch=1", *settings)
    config = resolve(recipe, cluster, base)
    short = resolve(recipe, cluster, [*base, "model.attention_pattern=[{window: 1}]"])
    return step_time(config, make_mesh(config, nodes)).compute - (
        step_time(short, make_mesh(short, nodes)).compute
    )


def test_blocks_compute_the_windows_and_a_dense_mask_all_pairs() -> None:
    full, windows = "model.attention_pattern=[]", "model.attention_pattern=[{window: 1024}]"
    compiled = [attention_s("mistral_7b", "p5", pattern) for pattern in (full, windows)]
    length, pairs = 8192, attention_pairs
    expected = pairs(length, length) / pairs(length, 1024)
    assert compiled[0] / compiled[1] == pytest.approx(expected, rel=0.01)
    eager = "train.compile=false"
    dense = attention_s("mistral_7b", "p5", windows, eager)
    assert dense == 0.0, "a window of one token has all pairs computed too"


def test_the_stage_with_most_attention_decides() -> None:
    """Full attention in the first or in the last layers of four stages."""

    def seconds(full: set[int]) -> float:
        kinds = ", ".join("{}" if n // 8 in full else "{window: 512}" for n in range(32))
        stages = ("parallel={pipeline: 4, auto: false}", f"model.attention_pattern=[{kinds}]")
        return attention_s("olmo3_7b", "p5", *stages)

    one, last, every = seconds({0}), seconds({3}), seconds({0, 1, 2, 3})
    assert one == pytest.approx(last)
    assert one == pytest.approx(every)
    assert seconds(set()) < one / 4


def test_one_mask_for_each_window() -> None:
    def masks(recipe: str, cluster: str, *settings: str) -> int:
        config = resolve(recipe, cluster, ["train.micro_batch=2", *settings])
        return StepMemory(config, make_mesh(config, 1), 0).masks()

    eager, document = "train.compile=false", "data.mask=document"
    square = 4 * LENGTH**2
    assert masks("tiny_olmo3", "local", eager) == square
    assert masks("tiny_smollm3", "local", eager) == 0
    rotations = 2 * 4 * LENGTH * 32
    assert masks("tiny_olmo3", "local", eager, document) == 2 * 2 * square + rotations
    # Two bases of rotary positions.
    assert masks("tiny_gemma3", "local", eager, document) == 2 * 2 * square + 2 * 2 * rotations
    # Windows that no sequence is longer than are none.
    longer = "model.attention_pattern=[{window: 128}, {}]"
    assert masks("tiny_olmo3", "local", eager, longer) == 0
    dense = masks("olmo3_7b", "p5", eager)
    assert dense == 2 * 8192**2
    assert 0 < masks("olmo3_7b", "p5", "train.compile=true") < dense / 50
    # trn1: a byte for each pair, of each window.
    config = resolve("olmo3_7b", "trn1", ["parallel={tensor: 8, auto: false}", "data.mask=none"])
    assert neuron_memory(config, make_mesh(config, 1))["masks"] == 2 * 8192**2


def test_large_masks_of_windows_are_warned_of() -> None:
    long = ("model.seq_len=131072", "train.global_batch=16")
    assert dense_mask_warning(resolve("olmo3_7b", "p5", long)) == []
    (warning,) = dense_mask_warning(resolve("olmo3_7b", "p5", [*long, "train.compile=false"]))
    assert warning.startswith("model.attention_pattern: the mask of one sequence of 131,072 tokens")
    assert warning.endswith("--set train.compile=true, which needs no such mask")
    (warning,) = dense_mask_warning(resolve("gemma3_1b", "local", [*long, "data.mask=document"]))
    assert "the 2 masks of one sequence of 131,072 tokens take 64.00 of" in warning
    (warning,) = dense_mask_warning(resolve("gemma3_1b", "local", long))
    assert warning.endswith("computes all pairs of tokens; choose a smaller model.seq_len")
