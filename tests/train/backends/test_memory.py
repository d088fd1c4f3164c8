"""Memory as `plan/memory.py` computes it: between steps, and kept for the backward pass."""

from __future__ import annotations

import math

import pytest
import torch
from amounts import sample
from mesh_pool import Case, MeshPool, micro_batches
from mesh_pool import small_run as small
from torch import Tensor

from slurmllm.plan.memory import worker_memory
from slurmllm.train.backends.native.runtime import NativeBackend
from slurmllm.train.model.init import local_part


def stored(backend: NativeBackend) -> dict[str, int]:
    """Bytes of weights, of their gradients and of the optimizer's moments."""
    parameters = list(backend.model.parameters())
    moments = [
        value
        for state in backend.optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.ndim
    ]
    return {
        "weights": sum(local_part(p).untyped_storage().nbytes() for p in parameters),
        "optimizer": sum(local_part(m).numel() * m.element_size() for m in moments),
    }


@pytest.mark.parametrize(
    "mesh",
    sample(
        2,
        [
            ("neox", 1, 1, 3, "train.global_batch=6", "train.precision=bf16_sr"),
            ("llama", 2, 2, 1, "train.precision=bf16_mixed", "parallel.virtual_pipeline=2"),
            ("llama", 1, 1, 4, "cluster.devices_per_node=2", "parallel.shard_nodes=1"),
            ("neox", 2, 1, 2, "train.micro_batch=4"),
            ("gpt3", 1, 2, 2, "train.precision=bf16_mixed"),
        ],
    ),
    ids=str,
)
def test_at_rest(pool: MeshPool, mesh: tuple[str, int, int, int]) -> None:
    config = small(*mesh)
    nodes = math.prod(mesh[1:4]) // config.cluster.devices_per_node
    case = Case(config, nodes, last=1, after=stored)
    for rank, outcome in enumerate(pool.run(case)):
        predicted = worker_memory(case.config, case.mesh, rank)
        assert outcome.after == {"weights": predicted.weights, "optimizer": predicted.optimizer}


def kept(backend: NativeBackend) -> int:
    """Bytes of all tensors that a forward pass keeps, parameters included."""
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = local_part(tensor).untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    (model,) = backend.chunks
    with backend.whole_weights():
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(*backend._to_device(micro_batches(backend, 1)[:1]))
        loss.backward()
    return sum(sizes.values())


def predicted_drop(case: Case, without: Case) -> int:
    most, least = (worker_memory(each.config, each.mesh).activations for each in (without, case))
    return most - least


@pytest.mark.parametrize("family", sample(1, ["llama", "neox"]))
def test_each_part_recomputed_saves_what_is_predicted(pool: MeshPool, family: str) -> None:
    def case(setting: str) -> Case:
        wide = ("model.seq_len=128", "train.micro_batch=8", "train.global_batch=8")
        recompute = f"train.activation_checkpointing={setting}"
        return Case(small(family, 1, 1, 1, *wide, recompute), last=0, after=kept)

    whole = case("none")
    (before,) = pool.run(whole)
    for setting in ("selective", "[mlp]", "[norm]", "[core, mlp]", "[core, mlp, norm]", "full"):
        (outcomes,) = pool.run(case(setting))
        predicted = predicted_drop(case(setting), whole)
        tolerance = 0.05 * worker_memory(whole.config, whole.mesh).activations
        assert before.after - outcomes.after == pytest.approx(predicted, abs=tolerance), setting


@pytest.mark.parametrize("family", sample(1, ["neox", "llama"]))
def test_the_mask_between_documents_is_kept_once(pool: MeshPool, family: str) -> None:
    def case(mask: str) -> Case:
        wide = ("model.seq_len=128", "train.micro_batch=8", "train.global_batch=8")
        return Case(small(family, 1, 1, 1, *wide, f"data.mask={mask}"), last=0, after=kept)

    masked = case("document")
    (before,), (outcomes,) = pool.run(case("none")), pool.run(masked)
    predicted = worker_memory(masked.config, masked.mesh).masks
    assert outcomes.after - before.after == pytest.approx(predicted, rel=0.1)


@pytest.mark.long
def test_compiled_tensor_parallel_parts(pool: MeshPool) -> None:
    """The same bits with less memory, sequence parallelism included."""

    def case(setting: str) -> Case:
        more = ("parallel.sequence=true", "train.micro_batch=4", "train.compile=true")
        recompute = f"train.activation_checkpointing={setting}"
        return Case(small("llama", 2, 1, 1, *more, recompute), last=3, after=kept)

    whole, parts = case("none"), case("[core, mlp]")
    before, outcomes = pool.run(whole), pool.run(parts)
    assert [outcome.rows for outcome in outcomes] == [outcome.rows for outcome in before]
    for more, less in zip(before, outcomes, strict=True):
        assert more.after - less.after >= predicted_drop(parts, whole) > 0
