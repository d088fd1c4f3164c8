from unittest.mock import patch

import pytest
import torch
from rounding import assert_rounded, rounding_bound
from torch.nn import functional as F

from slurmllm.train.model import IGNORED
from slurmllm.train.model.output import Output

pytestmark = pytest.mark.numerics
# Of a logit, of the sum of 53 exponentials, and of a mean or sum over 18 tokens; and back.
LOSS_TERMS = 16 + 53 + 18
TERMS = 2 * LOSS_TERMS


@pytest.mark.parametrize("at_a_time", [2**27, 500])
def test_wide_products_of_bf16_are_those_of_fp32_rounded(at_a_time: int) -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2, 9, 16, generator=generator).to(torch.bfloat16).requires_grad_()
    weight = torch.randn(53, 16, generator=generator).to(torch.bfloat16).requires_grad_()
    labels = torch.randint(0, 50, (2, 9), generator=generator)
    module = Output(vocab_size=50)
    module.wide = True
    with patch.object(Output, "logits_at_a_time", at_a_time):
        loss = module(x, weight, labels)
    loss.backward()

    exact_x, exact_weight = (t.detach().float().requires_grad_() for t in (x, weight))
    exact = F.cross_entropy(F.linear(exact_x, exact_weight[:50]).flatten(0, 1), labels.flatten())
    exact.backward()
    assert_rounded(loss, exact, LOSS_TERMS)
    for tensor, its in ((x, exact_x), (weight, exact_weight)):
        assert tensor.grad.dtype == torch.bfloat16
        # Rounded once: bf16 has 8 bits, so by 2^-9 of the next power of two at most.
        atol = rounding_bound(TERMS) * float(its.grad.abs().max())
        torch.testing.assert_close(tensor.grad.float(), its.grad, rtol=2**-8, atol=atol)
    assert not weight.grad[50:].any()


def plain_z_loss(
    x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, softcap: float | None = None
) -> torch.Tensor:
    """Cross entropy and z-loss as PaLM defines them, summed over the targets."""
    logits = F.linear(x, weight).flatten(0, 1)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    targets = labels.flatten() != IGNORED
    added = 1e-2 * torch.logsumexp(logits, -1)[targets].square().sum()
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum") + added


@pytest.mark.parametrize("at_a_time", [2**27, 500])
def test_z_loss_gradients_are_autograds(at_a_time: int) -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2, 9, 16, generator=generator).requires_grad_()
    weight = torch.randn(53, 16, generator=generator).requires_grad_()
    labels = torch.randint(0, 50, (2, 9), generator=generator)
    labels[0, :4] = IGNORED
    module = Output(vocab_size=50)
    plain = module(x, weight, labels)
    module.z_loss = 1e-2
    with patch.object(Output, "logits_at_a_time", at_a_time):
        loss = module(x, weight, labels)
    assert_rounded(loss, plain, LOSS_TERMS)  # the cross entropy alone
    gradients = torch.autograd.grad(loss * labels.numel(), (x, weight))
    expected = torch.autograd.grad(plain_z_loss(x, weight[:50], labels), (x, weight))
    without = torch.autograd.grad(plain * labels.numel(), (x, weight))
    for gradient, exact, other in zip(gradients, expected, without, strict=True):
        assert_rounded(gradient, exact, TERMS)
        assert (other - exact).abs().max() > 1e-2 * exact.abs().max()


@pytest.mark.parametrize("one_pass", [False, True])
@pytest.mark.parametrize(("at_a_time", "multiple"), [(2**27, 1), (500, 1), (500, 16)])
def test_soft_cap_gradients_are_autograds(at_a_time: int, multiple: int, one_pass: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2, 9, 16, generator=generator).requires_grad_()
    weight = torch.randn(53, 16, generator=generator).requires_grad_()
    labels = torch.randint(0, 50, (2, 9), generator=generator)
    labels[0, :4] = IGNORED
    module = Output(50, softcap=3.0)
    module.z_loss, module.one_pass, module.row_multiple = 1e-2, one_pass, multiple
    exact = F.linear(x, weight)
    assert_rounded(module(x, weight, None), 3 * torch.tanh(exact / 3), 16)
    with patch.object(Output, "logits_at_a_time", at_a_time):
        loss = module(x, weight, labels)
    gradients = torch.autograd.grad(loss * labels.numel(), (x, weight))
    expected = torch.autograd.grad(plain_z_loss(x, weight[:50], labels, 3.0), (x, weight))
    for gradient, autograds in zip(gradients, expected, strict=True):
        assert_rounded(gradient, autograds, TERMS)


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize(("rows", "at_a_time"), [(53, 2**27), (64, 2**27), (128, 800)])
def test_rows_of_padding_change_nothing(rows: int, at_a_time: int, z_loss: float) -> None:
    """The same products, in other blocks: padded by the recipe, by a copy, and in chunks."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2, 48, 16, generator=generator)
    weight = torch.randn(rows, 16, generator=generator)
    labels = torch.randint(0, 50, (2, 48), generator=generator)
    labels[0, :4] = IGNORED
    results = []
    for multiple in (1, 16):
        module = Output(vocab_size=50)
        module.row_multiple, module.z_loss, module.one_pass = multiple, z_loss, multiple > 1
        inputs = [t.clone().requires_grad_() for t in (x, weight)]
        with patch.object(Output, "logits_at_a_time", at_a_time):
            loss = module(*inputs, labels)
        loss.backward()
        results.append([loss, *(t.grad for t in inputs)])
    for padded, plain in zip(*reversed(results), strict=True):
        assert_rounded(padded, plain, TERMS)
    assert not results[1][2][50:].any()
