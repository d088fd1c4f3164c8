"""The verbs of the native backend, on one worker in this process."""

import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
import torch
from mesh_pool import counted, global_batch
from mesh_pool import micro_batches as documents
from rounding import training_rounding
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F

from slurmllm.train.backends.base import IGNORED
from slurmllm.train.backends.native import parallel, runtime
from slurmllm.train.model.decoder import build_model
from slurmllm.train.model.init import initialize
from train.backends.conftest import LABELS, NewBackend, batch, micro_batches, train, whole

pytestmark = pytest.mark.numerics


def norm_of(tensors: Iterable[torch.Tensor | None]) -> float:
    """Summed in fp64: torch sums norms in fp32."""
    return math.sqrt(
        sum(float(t.detach().double().square().sum()) for t in tensors if t is not None)
    )


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
    for (name, ours), (_, theirs) in zip(
        backend.model.named_parameters(), model.named_parameters(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("precision", "micro_batch"),
    [("fp32", 2), ("bf16_mixed", 2), ("bf16_mixed", 8), ("bf16_sr", 2)],
)
def test_one_worker_without_fsdp_has_the_same_bits(
    new_backend: NewBackend, monkeypatch: pytest.MonkeyPatch, precision: str, micro_batch: int
) -> None:
    curves, weights = [], []
    for with_fsdp in (False, True):
        if with_fsdp:
            monkeypatch.setattr(runtime, "fsdp_disabled", lambda config, mesh: False)
        backend = new_backend(f"train.precision={precision}", f"train.micro_batch={micro_batch}")
        curve = train(backend, 3, size=micro_batch)
        evaluated = backend.evaluate(micro_batches(batch(seed=9), micro_batch), LABELS)
        curves.append([*curve, float(evaluated)])
        weights.append({n: whole(p) for n, p in backend.model.named_parameters()})
        assert isinstance(backend.chunks[0], FSDPModule) == with_fsdp
    assert curves[0] == curves[1]
    for name, weight in weights[0].items():
        assert torch.equal(weight, weights[1][name]), name


@pytest.mark.parametrize("micro_batch", [2, 8])
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


@pytest.mark.parametrize(
    "override",
    ["train.activation_checkpointing=full", *(f"parallel.zero={stage}" for stage in (0, 2, 3))],
)
def test_what_only_saves_memory_changes_nothing(new_backend: NewBackend, override: str) -> None:
    assert train(new_backend(override), 3) == train(new_backend(), 3)


def test_bf16_mixed_stays_near_fp32(new_backend: NewBackend) -> None:
    exact = train(new_backend(), 5)
    mixed = new_backend("train.precision=bf16_mixed")
    figures = train(mixed, 5)
    assert figures != exact
    assert figures == pytest.approx(exact, rel=2e-2)
    assert {p.dtype for p in mixed.model.parameters()} == {torch.float32}, "master weights"


def test_every_parameter_decays_if_asked(new_backend: NewBackend) -> None:
    backend = new_backend("optim.decay_norms_and_biases=true")
    assert [group["weight_decay"] for group in backend.optimizer.param_groups] == [0.01]


def test_the_norm_is_the_host_s(new_backend: NewBackend) -> None:
    new_backend()  # a process group of one worker
    for seed in range(500):  # torch's square root is wrong in a hundredth of the cases
        values = torch.rand(10, generator=torch.Generator().manual_seed(seed))
        squares = parallel._sum_of_squares(values)
        assert float(parallel.total_norm([values], [1])) == math.sqrt(squares.item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", [0.0, 0.3, 1.0 - 1e-7, 1.0, 1.0 + 1e-9, 7.0, math.inf, math.nan])
def test_clipping_is_the_branch(norm: float, dtype: torch.dtype) -> None:
    values = [torch.randn(50, 40).to(dtype), torch.tensor([0.0, -0.0, 1e-38, 3e38]).to(dtype)]
    expected = [value.clone() for value in values]
    if norm > 1.0:
        torch._foreach_mul_(expected, 1.0 / (norm + 1e-6))
    factor = parallel.clip_factor(torch.tensor(norm, dtype=torch.float64), 1.0)
    parallel.scale_(values, factor)
    for result, value in zip(values, expected, strict=True):
        torch.testing.assert_close(result, value, rtol=0, atol=0, equal_nan=True)
