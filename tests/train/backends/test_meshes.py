"""The same training on every mesh: tensor, sequence, pipeline and data parallel, any mix.

Losses and norms of 4 steps of AdamW (12 in `make test-all`) at a usual learning rate, on random
tokens, agree with one process up to the order of fp32 sums.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from amounts import sample
from mesh_pool import FAMILIES, Case, CaseFailed, MeshPool, counted, deviation, micro_batches
from mesh_pool import small_run as small
from rounding import assert_rounded, gradient_terms, training_rounding

from slurmllm.core.config.resolve import RunConfig
from slurmllm.plan.parameters import parameter_shapes
from slurmllm.train.backends.native.parallel import Pipeline, num_copies
from slurmllm.train.backends.native.runtime import NativeBackend
from slurmllm.train.model.init import local_part
from train.backends.conftest import LABELS, STEPS, Reference, decayed, whole

pytestmark = pytest.mark.numerics
# DTensor costs tensor-parallel workers 30 ms a layer and micro batch on two busy cores.
FEW = "train.micro_batch=4"
SEQUENCE, FULL = "parallel.sequence=true", "train.activation_checkpointing=full"
SELECTIVE, INTERLEAVED = (
    "train.activation_checkpointing=selective",
    "parallel.virtual_pipeline=2",
)
PARTS = "train.activation_checkpointing=[core, mlp, norm]"
# Masks, positions that begin anew, and labels not learnt: other counts in each micro batch.
DOCUMENTS = "data.mask=document"

# Every family, kind of mesh and setting, and most pairs of them; `make test-all` runs the others.
MESHES: list[Any] = [
    ("neox", 4, 1, 1, FEW, SEQUENCE),
    ("neox", 1, 2, 1, "train.micro_batch=8"),  # fewer micro batches than stages
    ("llama", 2, 2, 1, FEW, INTERLEAVED, SELECTIVE),
    ("llama", 1, 2, 2, FULL, "parallel.zero=3"),
    ("llama3", 2, 1, 2, DOCUMENTS, FEW, SEQUENCE, "parallel.zero=3"),
    ("qwen3", 2, 1, 2, FEW, SEQUENCE, FULL, "parallel.zero=0"),
    ("gpt3", 1, 2, 2, INTERLEAVED, "parallel.zero=2"),
    ("gpt3", 2, 2, 1, FEW, SEQUENCE, PARTS),
]

LONG = [
    ("neox", 2, 1, 2, DOCUMENTS, FEW, SEQUENCE, "parallel.zero=3"),
    ("llama3", 2, 2, 1, FEW, SEQUENCE),
    ("gpt3", 1, 4, 1, DOCUMENTS),
    ("neox", 1, 2, 1),
    ("neox", 1, 4, 1),
    ("neox", 1, 1, 4, "parallel.zero=0", PARTS),
    ("neox", 1, 1, 2, "parallel.zero=2", SELECTIVE),
    ("neox", 2, 1, 2, FEW, "parallel.zero=3"),
    ("neox", 1, 2, 2, INTERLEAVED),
    ("llama", 1, 1, 2),
    ("llama", 2, 1, 2, FEW, SEQUENCE, FULL),
    ("llama", 4, 1, 1, FEW, PARTS),
    ("llama3", 1, 2, 2, INTERLEAVED, "parallel.zero=2"),
    ("qwen3", 2, 2, 1, FEW, INTERLEAVED, SELECTIVE),
    ("gpt3", 1, 4, 1),
    ("gpt3", 2, 1, 2, FEW),
    ("llama", 2, 1, 1, DOCUMENTS, FEW, SEQUENCE, SELECTIVE),
    ("gpt3", 2, 1, 1, DOCUMENTS, FEW, SEQUENCE, FULL),
    ("neox", 1, 2, 2, DOCUMENTS, INTERLEAVED, FULL),
    ("llama3", 2, 1, 1, FEW),
    ("llama3", 1, 2, 1),
    ("llama3", 1, 1, 2, FULL),
    ("llama3", 2, 1, 2, FEW, SELECTIVE, "parallel.zero=3"),
    ("qwen3", 2, 1, 1, FEW, DOCUMENTS),
    ("qwen3", 4, 1, 1, FEW, SEQUENCE),
    ("qwen3", 1, 2, 2, "parallel.zero=3"),
    ("qwen3", 1, 1, 4),
]
MESHES += [pytest.param(mesh, marks=pytest.mark.long) for mesh in LONG]


def tolerance(config: RunConfig) -> float:
    """Of losses and norms of STEPS steps."""
    targets = min(counted(config, step) for step in range(1, STEPS + 1))
    return training_rounding(config, STEPS, targets=targets)


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "-".join(str(part) for part in mesh))
def test_same_training(
    pool: MeshPool, reference: Reference, mesh: tuple[str, int, int, int]
) -> None:
    expected = reference(mesh[0], *(part for part in mesh if part == DOCUMENTS))
    outcomes = pool.run(Case(small(*mesh), last=STEPS, after=decayed))
    assert max(deviation(outcomes, expected)) < tolerance(small(*mesh))
    assert all(outcome.rows == outcomes[0].rows for outcome in outcomes), "all workers see the same"
    groups = {name: decay for outcome in outcomes for name, decay in outcome.after.items()}
    assert groups == expected[0].after


# One with a z-loss is in test_evaluation.py.
@pytest.mark.long
@pytest.mark.parametrize("documents", [(), (DOCUMENTS,)], ids=["plain", "documents"])
def test_compiled(pool: MeshPool, reference: Reference, documents: tuple[str, ...]) -> None:
    config = small("neox", 2, 1, 1, FEW, SEQUENCE, "train.compile=true", *documents)
    case = Case(config, last=STEPS)
    assert max(deviation(pool.run(case), reference("neox", *documents))) < tolerance(config)


def gradients(backend: NativeBackend) -> dict[str, np.ndarray]:
    """The gradients of one step, whole."""
    backend.forward_backward(micro_batches(backend, 1), counted(backend.config, 1))
    return {
        name: whole(p.grad).numpy()
        for name, p in backend.model.named_parameters()
        if p.grad is not None
    }


SHARDED, STAGED = (2, 1, 2, FEW, SEQUENCE), (2, 2, 1, FEW, INTERLEAVED)
GRADIENTS = [*zip(reversed(FAMILIES), [STAGED, SHARDED] * 3, strict=False)]
GRADIENTS += [(family, STAGED if mesh == SHARDED else SHARDED) for family, mesh in GRADIENTS]


@pytest.mark.parametrize(("family", "mesh"), sample(1, GRADIENTS, arguments=2))
def test_every_gradient(pool: MeshPool, family: str, mesh: tuple[int, int, int]) -> None:
    (reference,) = pool.run(Case(small(family), last=0, after=gradients))
    terms = gradient_terms(small(family).recipe.model, LABELS)
    assert reference.after.keys() == parameter_shapes(small(family).recipe.model).keys()
    outcomes = pool.run(Case(small(family, *mesh), last=0, after=gradients))
    for name, expected in reference.after.items():
        holders = [outcome.after[name] for outcome in outcomes if name in outcome.after]
        assert holders, name
        for result in holders:
            assert_rounded(result, expected, terms, name=name)


def shares(backend: NativeBackend) -> dict[str, float]:
    """How many elements of each parameter are this worker's, shared ones in part."""
    workers = backend.mesh.data * backend.mesh.tensor
    return {
        name: local_part(p).numel() / num_copies(p, workers)
        for name, p in backend.model.named_parameters()
    }


def test_uneven_shards_with_tensor_parallelism(pool: MeshPool, tmp_path: Path) -> None:
    # Of two tensor-parallel workers each has 249 entries and 63 rows of mlp.up, which two
    # data-parallel ones cannot halve.
    odd = ("model.vocab_size=497", "model.vocab_pad_multiple=2", "model.ffn_hidden_size=126")
    whole, uneven = small("neox", 1, 1, 1, *odd), small("neox", 2, 1, 2, *odd, FEW)
    expected = pool.run(Case(whole, last=6))
    outcomes = pool.run(Case(uneven, last=3, save=tmp_path, after=shares))
    assert outcomes[0].rows == [
        pytest.approx(row, rel=tolerance(whole)) for row in expected[0].rows[:3]
    ]
    for name, shape in parameter_shapes(whole.recipe.model).items():
        assert sum(outcome.after[name] for outcome in outcomes) == math.prod(shape), name
    back = pool.run(Case(whole, first=3, last=6, load=tmp_path))
    assert max(deviation(back, expected)) < tolerance(whole)


def test_what_a_stage_raises_is_not_wrapped() -> None:
    def step(*inputs: object, **options: object) -> None:
        try:
            raise torch.OutOfMemoryError("no more memory")
        except torch.OutOfMemoryError as error:
            raise RuntimeError("[Stage 0] failed to run forward: args: …") from error

    pipeline = Pipeline.__new__(Pipeline)
    pipeline.first, pipeline.last = True, False
    pipeline._schedule = SimpleNamespace(step=step)
    with pytest.raises(torch.OutOfMemoryError):
        pipeline.forward_backward(torch.zeros(1), torch.zeros(1), None, 1.0)


def test_a_worker_s_exception_reaches_the_test(pool: MeshPool) -> None:
    with pytest.raises(CaseFailed, match=r"rank 0:\n(.|\n)*ZeroDivisionError"):
        pool.run(Case(small("neox"), last=0, after=divide))


def divide(backend: NativeBackend) -> float:
    return 1 / 0
