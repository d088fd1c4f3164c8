"""Head and cross entropy in one, without logits in fp32 and without gathering them.

The matrix product with the head gives logits in the precision of training; they are overwritten by
the loss's gradient, and two more products compute the gradients of hidden states and head. So the
largest tensor of a small model, [tokens, vocabulary], exists once, in chunks of bounded size, and
the backward pass only scales the gradients. Under tensor parallelism each worker has a shard of the
vocabulary and sends two numbers a token (Shoeybi et al. 2019, arXiv 1909.08053, section 3).

torch's own `linear_cross_entropy` (2.13) does so for a whole vocabulary, but not for a shard.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from slurmllm.train.model import IGNORED

Statistics = Callable[[Tensor, float | None], tuple[Tensor, Tensor]]
SoftmaxInPlace = Callable[[Tensor, Tensor, Tensor | None, Tensor | None, float | None], Tensor]


class VocabularyShare(NamedTuple):
    """This worker's rows of the vocabulary: from entry `first` on, `rows` without padding.

    `group` are the workers among which it is sharded; None if this one has all of it.
    """

    first: int
    rows: int
    group: dist.ProcessGroup | None


class Output(nn.Module):
    """Hidden states and head to logits or loss; it has no parameters.

    `statistics`, `softmax_` and `softmax_gradient_` are the functions of these names or compiled
    versions. The gradient of the z-loss (PaLM, arXiv 2204.02311, section 5) is added, its value is
    not. `wide`: bf16 products are computed in fp32, from the same values, where that is faster.
    `row_multiple`: products have such a multiple of the vocabulary's entries and of tokens, so that
    rows are aligned for the fastest kernels of a GPU; entries added for it have the logit -inf.
    `logits_at_a_time`: of bf16, half as many of fp32. Fewer, larger products are faster.
    `one_pass`: the labels are subtracted in the pass that computes the softmax, as on a GPU.
    `softcap`: logits become softcap · tanh(logit / softcap).
    """

    logits_at_a_time = 2**27  # 256 MiB
    z_loss = 0.0
    wide = False
    row_multiple = 1
    one_pass = False

    def __init__(self, vocab_size: int, softcap: float | None = None) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.softcap = softcap
        self.statistics: Statistics = statistics
        self.softmax_: SoftmaxInPlace = softmax_
        self.softmax_gradient_ = softmax_gradient_

    def forward(self, x: Tensor, weight: Tensor, labels: Tensor | None) -> Tensor:
        """x [batch, seq, hidden] → logits [batch, seq, padded vocabulary], or with labels the loss.

        The weight is [padded vocabulary, hidden]; labels are entries of the vocabulary, or IGNORED.
        """
        if labels is None:
            logits = F.linear(x, weight)
            return logits if self.softcap is None else _capped(logits, self.softcap).type_as(logits)
        return self.loss(x, weight, labels, VocabularyShare(0, self.vocab_size, None))

    def loss(self, x: Tensor, weight: Tensor, labels: Tensor, share: VocabularyShare) -> Tensor:
        """Return the mean cross entropy over all labels, IGNORED ones as 0; equal on workers."""
        if not torch.is_grad_enabled():
            weight = weight.detach()  # else the function computes its gradient all the same
        total: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
            x.flatten(0, 1), weight, labels.flatten(), share, self
        )
        return total

    def rows(self, weight: Tensor, count: int) -> Tensor:
        """Return the first `count` rows of the weight, and more up to the multiple."""
        padded = math.ceil(count / self.row_multiple) * self.row_multiple
        if padded > len(weight):
            weight = F.pad(weight, (0, 0, 0, padded - len(weight)))
        return weight[:padded]

    def chunk(self, count: int, rows: int, limit: float) -> int:
        """Return how many of `count` tokens, of `rows` logits each, to compute at a time.

        They have about `limit` logits at most.
        """
        parts = max(1, math.ceil(count * rows / limit))
        if self.row_multiple > 1:  # chunks of one size, where possible, are one compiled graph
            even = (n for n in range(parts, 2 * parts) if count % (n * self.row_multiple) == 0)
            parts = next(even, parts)
        return math.ceil(math.ceil(count / parts) / self.row_multiple) * self.row_multiple


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Return the logits in fp32, capped; those of padding stay -inf."""
    values = logits.float()
    if softcap is None:
        return values
    capped = softcap * torch.tanh(values / softcap)
    return torch.where(values == -math.inf, values, capped)


def statistics(logits: Tensor, softcap: float | None = None) -> tuple[Tensor, Tensor]:
    """Return the largest logit of each row and the sum of exp(logit - largest), fp32 [rows]."""
    values = _capped(logits, softcap)
    largest = values.amax(-1)
    return largest, (values - largest.unsqueeze(-1)).exp().sum(-1)


def softmax_(
    logits: Tensor,
    log_sum: Tensor,
    scale: Tensor | None = None,
    target: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Overwrite logits [rows, entries] by exp(logit - log_sum [rows]), times scale [rows].

    Less 1 at each row's target [rows], if that is not negative. With a soft cap, of the capped
    logits, times the derivative of the cap.
    """
    values = (_capped(logits, softcap) - log_sum.unsqueeze(-1)).exp()
    if scale is not None:
        values = values * scale.unsqueeze(-1)
    if target is not None:
        entries = torch.arange(logits.shape[1], device=logits.device)
        values = values - (entries == target.unsqueeze(-1)).float()
    if softcap is not None:
        values = values * (1 - torch.tanh(logits.float() / softcap).square())
    return logits.copy_(values)


class _LinearCrossEntropy(torch.autograd.Function):
    """Mean of -log softmax(x · weightᵀ)[label]; the forward pass computes the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        share: VocabularyShare,
        output: Output,
    ) -> Tensor:
        need_x, need_weight = ctx.needs_input_grad[:2]
        rows = output.rows(weight, share.rows)
        if output.wide and x.is_cpu:
            x = x.float()
            rows = rows.float()
        count = len(labels)
        functions = output.statistics, output.softmax_
        one_pass = output.one_pass or not x.is_cpu
        options = functions, output.z_loss, one_pass, output.softcap
        size = output.chunk(count, len(rows), output.logits_at_a_time * 2 / rows.element_size())
        loss = torch.zeros((), dtype=torch.float32, device=x.device)
        logits = x.new_empty(size, len(rows))
        grad_x = torch.empty_like(x) if need_x else None
        # Gradients of several chunks are summed in fp32.
        kind = torch.float32 if count > size else rows.dtype
        grad_rows = rows.new_empty(rows.shape, dtype=kind) if need_weight else None
        for start in range(0, count, size):
            hidden = x[start : start + size]
            gradient = torch.mm(hidden, rows.T, out=logits[: len(hidden)])
            part_labels = labels[start : start + size]
            loss += output.softmax_gradient_(gradient, part_labels, share, *options)
            if grad_x is not None:
                torch.mm(gradient, rows, out=grad_x[start : start + size])
            if grad_rows is None:
                continue
            # The first chunk writes, the others add: no pass that zeroes the gradient.
            if kind == gradient.dtype:
                grad_rows.addmm_(gradient.T, hidden, beta=min(start, 1))
            elif start == 0:
                grad_rows.copy_(gradient.T @ hidden)
            else:
                grad_rows += gradient.T @ hidden
        ctx.save_for_backward(grad_x, grad_rows)
        ctx.count = count
        ctx.shape = weight.shape
        ctx.kind = weight.dtype
        return loss / count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        grad_x, grad_rows = ctx.saved_tensors
        # The incoming gradient carries the loss scale and the ratio of unmasked labels.
        factor = grads[0] / ctx.count
        if grad_x is not None:
            grad_x = _scaled(grad_x, factor, grad_x.shape, ctx.kind)
        if grad_rows is not None:
            grad_rows = _scaled(grad_rows, factor, ctx.shape, ctx.kind)
        return grad_x, grad_rows, None, None, None


def _scaled(values: Tensor, factor: Tensor, shape: torch.Size, kind: torch.dtype) -> Tensor:
    """Return values times factor, with the given type and shape; padding rows are 0."""
    out = values.new_empty(shape, dtype=kind)
    values = values[: shape[0]]
    if not values.is_cpu:
        # CUDA rounds a factor without dimensions to the type of bf16 values, an error of up to
        # 0.4 %; CPUs do not.
        factor = factor.unsqueeze(0)
    torch.mul(values, factor, out=out[: len(values)])
    out[len(values) :] = 0
    return out


def softmax_gradient_(
    logits: Tensor,
    labels: Tensor,
    share: VocabularyShare,
    functions: tuple[Statistics, SoftmaxInPlace],
    z_loss: float,
    one_pass: bool,
    softcap: float | None = None,
) -> Tensor:
    """Overwrite logits [rows, entries] by the gradient of the summed loss; return that sum.

    The gradient is softmax - one_hot, plus the z-loss's 2 · z_loss · log_sum · softmax; the sum is
    without the z-loss. `one_pass`: one_hot is subtracted in the pass that computes the softmax.
    Labels [rows] are entries of the whole vocabulary, or IGNORED; entries beyond the share's have
    the gradient 0.
    """
    compute_statistics, softmax_in_place = functions
    if share.rows < logits.shape[1]:
        logits[:, share.rows :] = -math.inf
    largest, total = compute_statistics(logits, softcap)
    ignored = labels == IGNORED
    column = labels - share.first
    is_local = (column >= 0) & (column < share.rows)
    index = torch.where(is_local, column, 0).unsqueeze(-1)
    target_logit = _capped(logits.gather(1, index).squeeze(-1), softcap)
    hit = torch.where(is_local, target_logit, 0.0)
    if share.group is not None:
        # The largest logit of all shards, so that no exponential overflows.
        common = largest.clone()
        dist.all_reduce(common, dist.ReduceOp.MAX, group=share.group)
        sums = torch.stack([total * (largest - common).exp(), hit])
        dist.all_reduce(sums, group=share.group)
        largest = common
        total, hit = sums.unbind()
    log_sum = largest + total.log()
    # exp(logit - inf) is 0: ignored rows need no pass of their own over the logits.
    scale = 1 + 2 * z_loss * log_sum if z_loss else None
    target = torch.where(is_local, column, -1) if one_pass else None
    softmax_in_place(logits, log_sum.masked_fill(ignored, math.inf), scale, target, softcap)
    if not one_pass:
        # On CPUs scatter_add_ copies all logits twice if they are bf16.
        rows = torch.arange(len(logits), device=logits.device)
        one_hot = is_local.float()
        if softcap is not None:
            one_hot = one_hot * (1 - (target_logit / softcap).square())
        logits.index_put_((rows, index.squeeze(-1)), -one_hot.to(logits.dtype), accumulate=True)
    return (log_sum - hit).masked_fill(ignored, 0).sum()
