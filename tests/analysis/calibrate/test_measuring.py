"""The time that measurements take, on devices fast and slow, and what is measured on a GPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from analysis.calibrate.test_fits import TASK  # noqa: E402

from slurmllm.analysis.calibrate.measuring import Item, measure, scale_of  # noqa: E402
from slurmllm.analysis.calibrate.node import GPU_LIMIT_S, Sample  # noqa: E402
from slurmllm.analysis.calibrate.worker import PARTS_S, _measurements  # noqa: E402


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("call_s", "longest_s"), [(0.0, 2.5), (0.2, 6.5)], ids=["fast", "slow"])
def test_a_part_keeps_its_time(
    alone: None, capfd: pytest.CaptureFixture[str], call_s: float, longest_s: float
) -> None:
    """Six measurements of three rounds in half a second: or one round, each of two calls."""
    items = [Item("copy", str(i), (), lambda: time.sleep(call_s)) for i in range(6)]
    begun = time.monotonic()
    measure(items, torch.device("cpu"), 0.15, 3, limit_s=0.5)
    assert time.monotonic() - begun < longest_s
    samples = [Sample.parse(line) for line in capfd.readouterr().out.splitlines()]
    assert [sample.of for sample in samples if sample] == list("012345")
    assert all(sample.value >= call_s for sample in samples if sample)


def test_the_measurements_of_a_gpu_fit_into_their_time() -> None:
    scale = scale_of(TASK)
    counts = {}
    for name, items in _measurements(TASK, scale, torch.device("meta")).items():
        if name != "collectives":  # their groups need the workers
            counts[name] = len(list(items()))
    # bf16 products of every size and the head's, and one in fp32 for its peak; nothing compiles.
    assert counts == {"matrix products": 14, "attention": 1, "memory": 1}
    for name, count in counts.items():
        assert count * scale.rounds * scale.budget_s <= PARTS_S[name]
    # What starts and compiles has the rest.
    assert sum(PARTS_S.values()) <= 0.75 * GPU_LIMIT_S < 45
