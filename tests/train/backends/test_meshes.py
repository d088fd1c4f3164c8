"""The same training on every mesh: tensor, sequence, pipeline and data parallel, any mix.

Losses and norms of 4 steps of AdamW (12 in `make test-all`) at a usual learning rate, on random
tokens, agree with one process up to the order of fp32 sums.
"""

import hashlib
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from amounts import sample
from mesh_pool import (
    FAMILIES,
    Case,
    CaseFailed,
    MeshPool,
    counted,
    deviation,
    evaluated,
    micro_batches,
)
from mesh_pool import small_run as small
from rounding import assert_rounded, gradient_terms, training_rounding
from torch import Tensor

from slurmllm.core.config.resolve import RunConfig
from slurmllm.plan.parameters import parameter_shapes
from slurmllm.train.backends.native.parallel import Pipeline, num_copies
from slurmllm.train.backends.native.runtime import NativeBackend
from slurmllm.train.model.decoder import build_model
from slurmllm.train.model.init import initialize, local_part
from train.backends.conftest import LABELS, STEPS, Reference, decayed, whole

pytestmark = pytest.mark.numerics
# DTensor costs tensor-parallel workers 30 ms a layer and micro batch on two busy cores.
FEW = "train.micro_batch=4"
SEQUENCE, FULL = "parallel.sequence=true", "train.activation_checkpointing=full"
SELECTIVE, INTERLEAVED = ("train.activation_checkpointing=selective", "parallel.virtual_pipeline=2")
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
    ("olmo3", 2, 1, 2, FEW, SEQUENCE, "parallel.zero=3"),
    ("gemma3", 2, 2, 1, FEW, SEQUENCE),
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
    ("mistral", 2, 1, 2, FEW, SEQUENCE, "parallel.zero=3"),
    ("smollm3", 2, 2, 1, FEW, SEQUENCE, DOCUMENTS),
    ("nanochat", 2, 1, 2, FEW, SEQUENCE, "parallel.zero=3"),
    ("mistral", 1, 2, 1, DOCUMENTS),
    ("smollm3", 1, 1, 2, "parallel.zero=3", SELECTIVE),
    ("olmo3", 1, 2, 1, DOCUMENTS, SELECTIVE),
    ("gemma3", 1, 1, 2, DOCUMENTS, "parallel.zero=3", PARTS),
    ("nanochat", 1, 2, 2, INTERLEAVED, FULL),
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


# One with a z-loss is in EVALUATED.
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
GRADIENTS = [*zip(reversed(FAMILIES), [STAGED, SHARDED] * len(FAMILIES), strict=False)]
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


HALF = STEPS // 2
CHANGES = {
    "pp2-tp2 to dp4": (
        small("neox", 2, 2, 1, FEW, SEQUENCE),
        small("neox", 1, 1, 4, "parallel.zero=3"),
    ),
    "tied over four stages to one process": (small("gpt3", 1, 4, 1), small("gpt3")),
    "dp2 to tp2-pp2 interleaved": (
        small("llama", 1, 1, 2),
        small("llama", 2, 2, 1, FEW, INTERLEAVED),
    ),
    "tied, one process to two stages of two": (small("gpt3"), small("gpt3", 1, 2, 2, INTERLEAVED)),
    "tp4 to tp2-dp2": (small("llama", 4, 1, 1, FEW), small("llama", 2, 1, 2, FEW, SEQUENCE)),
}


@pytest.mark.parametrize(("before", "after"), sample(1, CHANGES.values(), arguments=2), ids=CHANGES)
def test_goes_on(
    pool: MeshPool, reference: Reference, tmp_path: Path, before: RunConfig, after: RunConfig
) -> None:
    expected = reference(after.recipe.model.family)
    pool.run(Case(before, last=HALF, save=tmp_path))
    outcomes = pool.run(Case(after, first=HALF, last=STEPS, load=tmp_path))
    assert max(deviation(outcomes, expected)) < training_rounding(after, STEPS)


@pytest.mark.parametrize(
    "config",
    sample(
        1,
        [
            small("gpt3", 2, 2, 1, FEW, INTERLEAVED),
            small("neox", 2, 1, 2, FEW, SEQUENCE),
            small("gpt3", 1, 4, 1),
        ],
    ),
    ids=["tp2-pp2 tied", "tp2-dp2", "pp4 tied"],
)
def test_the_same_mesh_goes_on_exactly(pool: MeshPool, tmp_path: Path, config: RunConfig) -> None:
    whole = pool.run(Case(config, last=STEPS))
    saving = pool.run(Case(config, last=STEPS, save=tmp_path, save_at=HALF))
    assert saving[0].rows == whole[0].rows, "a save changes nothing"
    outcomes = pool.run(Case(config, first=HALF, last=STEPS, load=tmp_path))
    assert outcomes[0].rows == whole[0].rows[HALF:]


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest()


def digests(backend: NativeBackend) -> dict[str, str]:
    """Of the whole parameters that this worker has a share of."""
    return {name: digest(whole(p)) for name, p in backend.model.named_parameters()}


@pytest.mark.parametrize(
    "mesh",
    sample(
        3,
        [
            # 3 divides neither the vocabulary nor the widths: shards of unequal sizes.
            ("neox", 1, 1, 3, "train.global_batch=6"),
            ("llama", 2, 2, 1, "parallel.virtual_pipeline=2"),
            ("gpt3", 1, 2, 2),
            ("neox", 2, 1, 2),
            ("llama", 4, 1, 1),
        ],
    ),
    ids=str,
)
def test_one_process_has_the_same(pool: MeshPool, mesh: tuple[str, int, int, int]) -> None:
    config = small(*mesh)
    recipe = config.recipe
    model = build_model(recipe.model)
    initialize(model, recipe.model, recipe.train.seed)
    expected = {name: digest(p) for name, p in model.named_parameters()}
    outcomes = pool.run(Case(config, last=0, before=digests))
    assert {name for outcome in outcomes for name in outcome.before} == expected.keys()
    for outcome in outcomes:
        assert outcome.before.items() <= expected.items()


EVALUATED_STEPS = 3
Z_LOSS = "train.z_loss=0.01"

# Data-parallel workers alone are in tests/train/test_evaluation.py.
EVALUATED = [
    ("neox", 2, 1, 1, DOCUMENTS, Z_LOSS, FEW, SEQUENCE, "train.compile=true"),
    ("neox", 1, 2, 2, DOCUMENTS, INTERLEAVED, "train.activation_checkpointing=full"),
    ("neox", 2, 1, 2, DOCUMENTS, FEW, SEQUENCE, "parallel.zero=3"),
    ("neox", 1, 1, 2, DOCUMENTS, "parallel.zero=0"),
    ("neox", 1, 4, 1, DOCUMENTS),
    ("gpt3", 2, 2, 1, FEW),
    ("llama", 2, 1, 1, FEW, "train.compile=true", SEQUENCE),
]


@pytest.mark.parametrize(
    "mesh", sample(2, EVALUATED), ids=lambda mesh: "-".join(str(part) for part in mesh)
)
def test_same_loss_and_same_training(pool: MeshPool, mesh: tuple[str, int, int, int]) -> None:
    same = [part for part in mesh if part in (DOCUMENTS, Z_LOSS)]
    (expected,) = pool.run(
        Case(small(mesh[0], 1, 1, 1, *same), last=EVALUATED_STEPS, between=evaluated)
    )
    outcomes = pool.run(Case(small(*mesh), last=EVALUATED_STEPS, between=evaluated))
    if "train.compile=true" not in mesh:
        plain = pool.run(Case(small(*mesh), last=EVALUATED_STEPS))
        assert [o.rows for o in outcomes] == [o.rows for o in plain], "bit-identical"
    # Of two in three sequences, whose prompts are not learnt.
    tolerance = training_rounding(small(*mesh), EVALUATED_STEPS, targets=LABELS // 4)
    assert max(deviation(outcomes, [expected])) < tolerance
    for outcome in outcomes:
        assert outcome.between == pytest.approx(expected.between, rel=tolerance)
    assert len(set(expected.between)) == EVALUATED_STEPS
