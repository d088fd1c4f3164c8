"""The training loop: ranks, optimizer and resumes, with the faults that the settings ask for.

Ranks are simulated in one process: each has its own share of the batch and its own gradient, and
the reduction is a sum of these. Ranks that lost their reduction get weights of their own.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from departures.corpus import read_passes
from departures.model import initial_weights, layout, loss_sum, mask
from departures.settings import STEPS, Settings

Event = Literal[
    "none", "exact_resume", "lost_moments", "lost_count", "lost_optimizer", "old_weights",
    "weights_through_bf16",
]  # fmt: skip
Columns = dict[str, list[float]]
OLD_STEPS = 5  # by which the weights of `old_weights` are older
_SCALED, _HALVED = 1.05, 0.5  # the gradient of a faulty rank


@dataclass(frozen=True)
class Change:
    """What differs from step `since` on, and what happens once before it."""

    since: int
    settings: Settings
    event: Event = "none"


@dataclass
class State:
    """What a checkpoint holds.

    Attributes:
        weights: One row, or one per rank if their gradients are not reduced. [copies, weights]
        first, second: Moments of the optimizer. [copies, weights]
        count: Updates so far, for the bias correction.
        old: Weights of the last steps, the oldest first. [copies, weights] each
        stale: Gradient of the last rank one step ago. [weights]
        generator: Source of the dropout.
    """

    weights: Tensor
    first: Tensor
    second: Tensor
    count: int
    generator: torch.Generator
    old: list[Tensor] = field(default_factory=list)
    stale: Tensor | None = None

    def copy(self) -> State:
        """Returns a state that trains on by itself; tensors are replaced, never written to."""
        generator = torch.Generator()
        generator.set_state(self.generator.get_state())
        return replace(self, generator=generator, old=list(self.old))


def train(
    settings: Settings, changes: Sequence[Change] = (), steps: int = STEPS
) -> tuple[Columns, list[Columns]]:
    """Train the reference from step 1, and each changed run from the first step of its change.

    Returns:
        The columns of the reference, and those of each changed run, its shared steps included.
        [steps] each. `grad_norm` is before clipping, `param_norm` after the update. For faulty
        logs only: `grad_norm_clipped`, `grad_norm_without_embeddings`, `loss_of_rank`.
    """
    torch.set_num_threads(1)
    state = _initial_state(settings)
    reference: Columns = {}
    found: list[Columns] = [{} for _ in changes]
    for step in range(1, steps + 1):
        for columns, change in zip(found, changes, strict=True):
            if change.since == step:
                # A change of the first step may be of the initial weights.
                branch = _initial_state(change.settings) if step == 1 else state.copy()
                _begin(branch, settings, change)
                columns |= {name: list(values) for name, values in reference.items()}
                for later in range(step, steps + 1):
                    _append(columns, _train_step(branch, change.settings, later))
        _append(reference, _train_step(state, settings, step))
    return reference, found


def _append(columns: Columns, row: dict[str, float]) -> None:
    for name, value in row.items():
        columns.setdefault(name, []).append(value)


def learning_rate(settings: Settings, step: int) -> float:
    """Returns the learning rate of a step, counted from 1."""
    step -= settings.schedule_start
    if step <= settings.warmup:
        return settings.lr * step / settings.warmup
    if settings.schedule == "constant":
        return settings.lr
    if settings.schedule == "inverse_sqrt":
        return settings.lr * math.sqrt(max(settings.warmup, 1) / step)
    share = min(1.0, (step - settings.warmup) / (settings.decay_steps - settings.warmup))
    left = 1 - share if settings.schedule == "linear" else (1 + math.cos(math.pi * share)) / 2
    return settings.lr * (settings.min_lr + (1 - settings.min_lr) * left)


def _initial_state(settings: Settings) -> State:
    weights = initial_weights(settings).unsqueeze(0)
    return State(
        weights, torch.zeros_like(weights), torch.zeros_like(weights), 0, _generator(settings)
    )


def _generator(settings: Settings) -> torch.Generator:
    seed = settings.seed if settings.dropout_seed is None else settings.dropout_seed
    return torch.Generator().manual_seed(10_000 + seed)


def _begin(state: State, before: Settings, change: Change) -> None:
    """Apply what happens once, before the first step that differs."""
    now = change.settings
    if now.dropout_seed is not None:
        state.generator = _generator(now)
    if before.tied and not now.tied and change.since > 1:
        state.weights = state.weights.clone()
        views = layout().views(state.weights[0])
        views["head"].copy_(views["embedding"])
    if now.gradient_fault in ("not_reduced", "bucket_not_reduced"):
        for name in ("weights", "first", "second"):
            setattr(state, name, getattr(state, name).repeat(now.ranks, 1))
    match change.event:
        case "lost_moments":
            state.first, state.second = map(torch.zeros_like, (state.first, state.second))
        case "lost_count":
            state.count = 0
        case "lost_optimizer":
            state.first, state.second = map(torch.zeros_like, (state.first, state.second))
            state.count = 0
        case "old_weights":
            state.weights = state.old[0].clone()
        case "weights_through_bf16":
            state.weights = state.weights.to(torch.bfloat16).float()
        case "exact_resume":
            file = io.BytesIO()
            held = (state.weights, state.first, state.second, state.generator.get_state())
            torch.save(held, file)
            file.seek(0)
            state.weights, state.first, state.second, generator = torch.load(file)
            state.generator = torch.Generator()
            state.generator.set_state(generator)


def _train_step(state: State, settings: Settings, step: int) -> dict[str, float]:
    batches = read_passes(settings, step)
    targets = sum(batch.targets for passes in batches for batch in passes)
    losses: list[float] = []
    gradients = []
    for rank, passes in enumerate(batches):
        vector = state.weights[min(rank, len(state.weights) - 1)].detach().requires_grad_()
        parts = []
        loss = 0.0
        for number, batch in enumerate(passes):
            total = loss_sum(vector, batch, settings, state.generator)
            loss += total.item()
            scale = 1 / targets
            if settings.micro_batch_means:
                scale = 1 / (batch.targets * settings.ranks * settings.micro_batches)
            if number >= len(passes) - settings.micro_batches_left_out:
                continue
            (gradient,) = torch.autograd.grad(total * scale, vector)
            parts += [gradient] * (2 if number == 0 and settings.copy_of_first_micro_batch else 1)
        losses.append(loss)
        gradients.append(_add(parts, settings))
    own = sum(batch.targets for batch in batches[0])
    reduced = _reduce(gradients, state, settings, step)
    counted = _counted(settings.tied, settings.frozen)
    norms = (reduced * counted).norm(dim=1, keepdim=True)
    clipped = reduced
    if settings.clip is not None:
        clipped = reduced * (settings.clip / (norms + 1e-6)).clamp(max=1.0)
    lr = learning_rate(settings, step)
    state.old = [*state.old[-OLD_STEPS + 1 :], state.weights.clone()]
    _update(state, clipped, settings, lr, step)
    inner = counted * (1 - mask("embedding", "head"))
    return {
        "step": step,
        "loss": sum(losses) / targets,
        "grad_norm": norms[0].item(),
        "lr": lr,
        "param_norm": (state.weights[0] * counted).norm().item(),
        "grad_norm_clipped": (clipped[0] * counted).norm().item(),
        "grad_norm_without_embeddings": (reduced[0] * inner).norm().item(),
        "loss_of_rank": losses[0] / own,
    }


def _add(parts: list[Tensor], settings: Settings) -> Tensor:
    total = torch.zeros_like(parts[0])
    for part in reversed(parts) if settings.reversed_sums else parts:
        total = total + part
    return total


@lru_cache(maxsize=8)
def _counted(tied: bool, frozen: str) -> Tensor:
    """1.0 of weights that count in norms: one copy of each, no head if it is tied. [weights]"""
    counted = torch.ones_like(mask("norm"))
    views = layout().views(counted)
    for name, view in views.items():
        if "norm" in name:
            view[1:] = 0.0
    if tied:
        views["head"].zero_()
    return counted * (1 - _frozen(frozen))


def _frozen(name: str) -> Tensor:
    names = {"biases": ("bias",), "layer": ("0.",), "embeddings": ("embedding",)}
    return mask(*names.get(name, ()))


def _reduce(gradients: list[Tensor], state: State, settings: Settings, step: int) -> Tensor:
    """Reduce the gradients of the ranks over data and sequence parallelism. [copies, weights]"""
    fault, ranks = settings.gradient_fault, len(gradients)
    last = gradients[-1]
    match fault:
        case "rank_dropped":
            gradients = [*gradients[:-1], torch.zeros_like(last)]
        case "rank_scaled":
            gradients = [*gradients[:-1], last * _SCALED]
        case "rank_halved":
            gradients = [*gradients[:-1], last * _HALVED]
        case "rank_stale":
            stale = torch.zeros_like(last) if state.stale is None else state.stale
            gradients = [*gradients[:-1], stale]
        case "clipped_by_rank" if settings.clip is not None:
            norms = [
                ranks * (one * _counted(settings.tied, settings.frozen)).norm() for one in gradients
            ]
            pairs = zip(gradients, norms, strict=True)
            gradients = [one * (settings.clip / norm).clamp(max=1.0) for one, norm in pairs]
        case "element_flipped":
            wrong = last.clone()
            wrong[step * 7919 % len(wrong)] += 0.3
            gradients = [*gradients[:-1], wrong]
    state.stale = last
    if settings.gradients_in_bf16:
        gradients = [one.to(torch.bfloat16).float() for one in gradients]
    total = _add(gradients, settings)
    match fault:
        case "summed":
            total = total * ranks
        case "world_size":
            total = total / ranks
        case "not_a_number":
            total = total * math.nan
        case "not_reduced":
            return torch.stack([ranks * _reduce_norms(one) for one in gradients])
        case "bucket_not_reduced":
            bucket = mask("1.")
            rows = [total * (1 - bucket) + ranks * one * bucket for one in gradients]
            return torch.stack([_reduce_norms(row) for row in rows])
    return (total if fault == "norms_not_reduced" else _reduce_norms(total)).unsqueeze(0)


def _reduce_norms(gradient: Tensor) -> Tensor:
    """Add the gradients of both copies of the norm weights. [weights]"""
    gradient = gradient.clone()
    for name, view in layout().views(gradient).items():
        if "norm" in name:
            view.copy_(view.sum(dim=0, keepdim=True).expand_as(view))
    return gradient


def _update(state: State, gradient: Tensor, settings: Settings, lr: float, step: int) -> None:
    state.count += 1
    weights = state.weights
    decayed = torch.ones_like(weights[0])
    if not settings.decay_norms:
        decayed -= mask("norm", "bias")
    decay = settings.weight_decay * decayed
    if settings.optimizer == "adam_l2":
        gradient = gradient + decay * weights
    beta1, beta2 = settings.beta1, settings.beta2
    if settings.optimizer == "momentum":
        state.first = beta1 * state.first + gradient
        moved = 4.0 * state.first
    else:
        state.first = beta1 * state.first + (1 - beta1) * gradient
        state.second = beta2 * state.second + (1 - beta2) * gradient * gradient
        if settings.moments == "bf16":
            state.first = state.first.to(torch.bfloat16).float()
            state.second = state.second.to(torch.bfloat16).float()
        first, second = state.first, state.second
        if settings.bias_correction:
            first = first / (1 - beta1**state.count)
            second = second / (1 - beta2**state.count)
        moved = first / (second.sqrt() + settings.eps)
    if settings.optimizer != "adam_l2":
        moved = moved + decay * weights
    moved = moved * (1 - _frozen(settings.frozen))
    if settings.tied:
        moved = moved * (1 - mask("head"))
    if settings.lr_of_embeddings != 1.0:
        moved = moved * (1 + (settings.lr_of_embeddings - 1) * mask("embedding"))
    if settings.shard_not_updated:
        moved[:, len(decayed) // 2 : 3 * len(decayed) // 4] = 0.0
    weights = weights - lr * moved
    if settings.weights == "bf16":
        weights = weights.to(torch.bfloat16).float()
    elif settings.weights == "bf16_stochastic":
        generator = torch.Generator().manual_seed(step)
        noise = torch.randint(0, 1 << 16, weights.shape, generator=generator, dtype=torch.int32)
        weights = ((weights.contiguous().view(torch.int32) + noise) & ~0xFFFF).view(torch.float32)
    state.weights = weights
