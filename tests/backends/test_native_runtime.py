"""The verbs of the native backend, on one worker in this process."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import SupportsFloat

import numpy as np
import pytest
import torch
from mesh_pool import counted, global_batch
from mesh_pool import micro_batches as documents
from rounding import training_rounding
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F

from backends.conftest import LABELS, NewBackend, batch, micro_batches, whole
from slurmllm.backends.base import IGNORED, Backend
from slurmllm.backends.native import runtime
from slurmllm.backends.native.runtime import NativeBackend
from slurmllm.errors import StorageError
from slurmllm.model.decoder import build_model
from slurmllm.model.init import initialize

pytestmark = pytest.mark.numerics


def norm_of(tensors: Iterable[torch.Tensor | None]) -> float:
    """Summed in fp64: torch sums norms in fp32."""
    return math.sqrt(
        sum(float(t.detach().double().square().sum()) for t in tensors if t is not None)
    )


def train(backend: Backend, steps: int, *, first: int = 0, micro_batch: int = 2) -> list[float]:
    """Loss, gradient norm and parameter norm of some steps, one after the other."""
    figures: list[SupportsFloat] = []
    for step in range(first, first + steps):
        loss = backend.forward_backward(micro_batches(batch(seed=step), micro_batch), LABELS)
        figures += [loss, backend.optimizer_step(1e-2), backend.param_norm()]
    return [float(figure) for figure in figures]


def test_one_step_is_a_plain_training_step(new_backend: NewBackend) -> None:
    backend = new_backend("optim.grad_clip=0.5", "optim.weight_decay=0.1")
    loss, norm, param_norm = train(backend, 1)
    config = backend.config.recipe.model
    model = build_model(config)
    initialize(model, config, backend.config.recipe.train.seed)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=1e-2,
        betas=(0.9, 0.95),
        eps=1e-5,
    )
    tokens = torch.from_numpy(batch())
    plain = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    plain.backward()
    plain_norm = norm_of(p.grad for p in model.parameters())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    rounding = training_rounding(backend.config, 1)
    assert loss == pytest.approx(plain.item(), rel=rounding)
    assert norm == pytest.approx(plain_norm, rel=rounding)
    assert norm > 0.5, "or clipping is not seen"
    assert param_norm == pytest.approx(norm_of(model.parameters()), rel=rounding)
    assert isinstance(backend, NativeBackend)
    for (name, ours), (_, theirs) in zip(
        backend.model.named_parameters(), model.named_parameters(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("precision", ["fp32", "bf16_mixed", "bf16_sr"])
@pytest.mark.parametrize("micro_batch", [2, 8])
def test_one_worker_without_fsdp_has_the_same_bits(
    new_backend: NewBackend, monkeypatch: pytest.MonkeyPatch, precision: str, micro_batch: int
) -> None:
    curves, weights = [], []
    for with_fsdp in (False, True):
        if with_fsdp:
            monkeypatch.setattr(runtime, "fsdp_disabled", lambda config, mesh: False)
        backend = new_backend(f"train.precision={precision}", f"train.micro_batch={micro_batch}")
        assert isinstance(backend, NativeBackend)
        curve = train(backend, 3, micro_batch=micro_batch)
        evaluated = backend.evaluate(micro_batches(batch(seed=9), micro_batch), LABELS)
        curves.append([*curve, float(evaluated)])
        weights.append({n: whole(p) for n, p in backend.model.named_parameters()})
        assert isinstance(backend.chunks[0], FSDPModule) == with_fsdp
    assert curves[0] == curves[1]
    for name, weight in weights[0].items():
        assert torch.equal(weight, weights[1][name]), name


@pytest.mark.parametrize("micro_batch", [1, 2, 8])
def test_the_mean_is_over_the_labels_that_count(new_backend: NewBackend, micro_batch: int) -> None:
    backend = new_backend("data.mask=document", f"train.micro_batch={micro_batch}")
    config = backend.config.recipe.model
    whole, parts = global_batch(backend.config, 1), documents(backend, 1)
    if len(parts) > 1:
        assert len({int((part.labels != IGNORED).sum()) for part in parts}) > 1, "uneven"
    loss = float(backend.forward_backward(parts, counted(backend.config, 1)))
    norm = float(backend.optimizer_step(1e-2))

    model = build_model(config)
    initialize(model, config, backend.config.recipe.train.seed)
    assert whole.positions is not None
    tokens, labels, positions = map(torch.from_numpy, (whole.tokens, whole.labels, whole.positions))
    logits = model(tokens, positions=positions)[..., : config.vocab_size]
    plain = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    plain.backward()
    plain_norm = norm_of(p.grad for p in model.parameters())
    rounding = training_rounding(backend.config, 1, targets=counted(backend.config, 1))
    assert loss == pytest.approx(plain.item(), rel=rounding)
    assert norm == pytest.approx(plain_norm, rel=rounding)


def test_a_batch_without_a_label_teaches_nothing(new_backend: NewBackend) -> None:
    backend = new_backend("optim.weight_decay=0", "optim.grad_clip=1.0")
    before = float(backend.param_norm())
    empty = [replace(m, labels=np.full_like(m.labels, IGNORED)) for m in micro_batches(batch(), 2)]
    assert float(backend.forward_backward(empty, 0)) == 0
    assert float(backend.optimizer_step(1e-2)) == 0
    assert float(backend.param_norm()) == before


@pytest.mark.parametrize("micro_batch", [1, 4, 8])
def test_accumulation_changes_only_rounding(new_backend: NewBackend, micro_batch: int) -> None:
    whole = new_backend()
    reference, rounding = train(whole, 3), training_rounding(whole.config, 3)
    assert train(new_backend(), 3, micro_batch=micro_batch) == pytest.approx(
        reference, rel=rounding
    )


@pytest.mark.parametrize(
    "override",
    [
        "train.activation_checkpointing=full",
        "parallel.zero=0",
        "parallel.zero=2",
        "parallel.zero=3",
    ],
)
def test_what_only_saves_memory_changes_nothing(new_backend: NewBackend, override: str) -> None:
    assert train(new_backend(override), 3) == train(new_backend(), 3)


def test_bf16_mixed_stays_near_fp32(new_backend: NewBackend) -> None:
    exact = train(new_backend(), 5)
    mixed = new_backend("train.precision=bf16_mixed")
    figures = train(mixed, 5)
    assert figures != exact
    assert figures == pytest.approx(exact, rel=2e-2)
    assert isinstance(mixed, NativeBackend)
    assert {p.dtype for p in mixed.model.parameters()} == {torch.float32}, "master weights"


def test_every_parameter_decays_if_asked(new_backend: NewBackend) -> None:
    backend = new_backend("optim.decay_norms_and_biases=true")
    assert isinstance(backend, NativeBackend)
    assert [group["weight_decay"] for group in backend.optimizer.param_groups] == [0.01]


def test_shards_bring_back_the_exact_state(new_backend: NewBackend, tmp_path: Path) -> None:
    backend = new_backend()
    train(backend, 3)
    names = backend.save_shards(tmp_path).wait()
    assert sorted(names) == sorted(path.name for path in tmp_path.iterdir())
    random_numbers = torch.rand(3)
    expected = train(backend, 3, first=3)
    resumed = new_backend()
    resumed.load_shards(tmp_path)
    assert torch.equal(torch.rand(3), random_numbers)
    assert train(resumed, 3, first=3) == expected


def test_missing_shards_are_the_storage_s_fault(new_backend: NewBackend, tmp_path: Path) -> None:
    backend = new_backend()
    backend.save_shards(tmp_path)
    (tmp_path / "__0_0.distcp").unlink()
    with pytest.raises(StorageError, match=r"cannot read shards from .*No such file"):
        backend.load_shards(tmp_path)


def test_gather_and_counts(new_backend: NewBackend) -> None:
    backend = new_backend()
    assert backend.control.gather({"a": 1}) == [{"a": 1}]
    before = backend.graph_cache_counts()  # of this process, other tests included
    train(backend, 1)
    assert backend.graph_cache_counts() == before, "nothing is compiled where compile is off"
