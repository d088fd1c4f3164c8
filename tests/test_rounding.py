"""The tolerances of tests: wide enough for any order of a sum, too narrow for a fault."""

import os

import pytest
import torch
from mesh_pool import small_run
from rounding import assert_rounded, gradient_terms, rounding_bound, training_rounding

pytestmark = pytest.mark.numerics


def sums(terms: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """500 sums of as many numbers: one after the other, from the end, and of halves."""
    numbers = torch.rand(terms, 500, generator=torch.Generator().manual_seed(seed)).to(dtype)

    def add(rows: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(rows[0])
        for row in rows:
            total = total + row
        return total

    half = (terms + 1) // 2
    return [add(numbers), add(numbers.flip(0)), add(numbers[:half]) + add(numbers[half:])]


# Longer sums of bf16 stop to grow: each term is below half of the spacing, and all round down.
@pytest.mark.parametrize(
    ("terms", "dtype"),
    [*((n, torch.float32) for n in (3, 30, 1000)), (3, torch.bfloat16), (30, torch.bfloat16)],
)
def test_sums_in_any_order(terms: int, dtype: torch.dtype) -> None:
    results = [total.double() for total in sums(terms, dtype, seed=1)]
    apart = max(float((a / b - 1).abs().max()) for a in results for b in results)
    assert apart < rounding_bound(terms, dtype)
    assert apart > rounding_bound(terms, dtype) / 50, "the bound is of the size of what it bounds"


def test_a_fault_is_not_rounding() -> None:
    """A ten-thousandth, of a gradient or of a training."""
    config = small_run("qwen3")
    gradient = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    terms = gradient_terms(config.recipe.model, 256)
    assert_rounded(gradient * (1 + 1e-6), gradient, terms)
    with pytest.raises(AssertionError, match=r"^head: .* apart, .* allowed of 3\.\d+"):
        assert_rounded(gradient * (1 + 1e-4), gradient, terms, name="head")
    assert training_rounding(config, 20) < 2e-5


def test_this_process_computes_as_it_was_asked_to() -> None:
    """A misspelt variable of `make numerics` would have no effect."""
    if os.environ.get("MKL_DYNAMIC") == "FALSE":
        assert torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"])
    if capability := os.environ.get("ATEN_CPU_CAPABILITY"):
        assert torch.backends.cpu.get_cpu_capability() == capability.upper()
