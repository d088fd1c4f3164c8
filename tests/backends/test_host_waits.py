"""Losses and norms stay on the device: the same bits as numbers of the host, read when asked for.

`make gpu` shows on a GPU that the host waits for nothing (tests/backends/test_cuda.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

import pytest
import torch
import torch.distributed as dist
from amounts import amount, sample
from mesh_pool import Case, MeshPool, Outcome
from mesh_pool import small_run as small
from torch import Tensor

from backends.conftest import NewBackend
from slurmllm.backends.native import parallel, runtime
from slurmllm.backends.native.device import DeviceNumber, send
from slurmllm.model.init import local_part

pytestmark = pytest.mark.numerics

CASES = [
    ("llama", 2, 1, 1, "train.precision=bf16_sr"),
    ("gpt3", 1, 2, 2),
    ("neox", 1, 1, 1),
    ("llama", 1, 1, 2, "train.precision=bf16_mixed"),
    ("llama", 2, 1, 2, "train.precision=bf16_sr"),
    ("gpt3", 2, 2, 2, "parallel.sequence=true"),
]
STEPS = amount(8, of=20)


@pytest.fixture(scope="module")
def eight() -> MeshPool:
    return MeshPool(8)  # opens processes for each case


def use_numbers_of_the_host() -> None:
    """Compute norms and clip as before they stayed on the device: with a branch on the host."""

    def total_norm(tensors: Sequence[Tensor], copies: Sequence[int], **_: object) -> float:
        squares = [parallel._sum_of_squares(local_part(t).detach()) for t in tensors]
        total = (torch.stack(squares) / torch.tensor(copies, dtype=torch.float64)).sum()
        dist.all_reduce(total)
        return math.sqrt(total.item())

    def clip_factor(norm: float, limit: float) -> float:
        return limit / (norm + 1e-6) if norm > limit else 1.0

    def scale(tensors: Sequence[Tensor], factor: float) -> None:
        if factor != 1.0:
            torch._foreach_mul_([local_part(t) for t in tensors], factor)

    changed = {"total_norm": total_norm, "clip_factor": clip_factor, "scale_": scale}
    vars(runtime).update(changed, DeviceNumber=float)


@pytest.mark.parametrize(
    "mesh", sample(2, CASES), ids=lambda mesh: "-".join(str(part) for part in mesh)
)
def test_same_bits_with_and_without_clipping(eight: MeshPool, mesh: tuple[str, int]) -> None:
    def run(limit: float, **options: object) -> list[Outcome]:
        config = small(*mesh, f"optim.grad_clip={limit!r}")
        return eight.run(Case(config, last=STEPS, **options))

    unlimited = run(0.0)
    # A limit that the norm exceeds in some of the steps.
    limit = median(norm for _, norm, _ in unlimited[0].rows[: STEPS // 2])
    clipped = run(limit)
    assert {norm > limit for _, norm, _ in clipped[0].rows} == {True, False}
    assert clipped != unlimited
    assert clipped == run(limit, prepare=use_numbers_of_the_host)


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


def test_a_number_keeps_its_value() -> None:
    total = torch.tensor(2.5, dtype=torch.float64)
    number = DeviceNumber(total / 3)
    total += 1
    assert float(number) == 2.5 / 3
    assert torch.equal(send(torch.arange(3), torch.device("cpu")), torch.arange(3))
