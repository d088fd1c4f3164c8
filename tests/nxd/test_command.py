"""Whole runs through the command line, on the real NxD: alone, and changing between backends."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from end_to_end.bench import SMALL, Bench

from nxd.conftest import nxd_environment
from slurmllm.checkpoint.formats.nxd_files import LAYOUT

pytestmark = pytest.mark.nxd

COMMON = (
    "--local",
    "--nodes=2",
    "--set=train.compile=false",
    "--set=optim.decay_steps=40",
    "--set=checkpoint.every_steps=10",
    "--set=checkpoint.asynchronous=true",
)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    for name, value in nxd_environment().items():
        monkeypatch.setenv(name, value)
    with Bench(tmp_path / "runs") as bench:
        yield bench


def compared(bench: Bench, run: str, other: str) -> dict[str, object]:
    tolerances = ("--tolerance=1e-5", "--grad-norm-tolerance=1e-5")
    return dict(json.loads(bench.call("compare", run, other, "--json", *tolerances)))


def test_native_and_nxd_match_and_take_over_from_each_other(
    bench: Bench, inputs: tuple[str, ...]
) -> None:
    def submit(name: str, backend: str, steps: int, *more: str) -> None:
        bench.call(
            "submit",
            "tiny_neox",
            f"--name={name}",
            *SMALL,
            *COMMON,
            *inputs,
            f"--set=backend={backend}",
            f"--set=train.steps={steps}",
            *more,
        )

    submit("native", "native", 40)
    submit("nxd", "nxd", 40)
    differences = compared(bench, "native", "nxd")
    assert differences["verdict"] == "match"
    assert differences["steps_compared"] == 40
    submit("moved", "native", 15)
    bench.call("resume", "moved", "--set=backend=nxd", "--set=train.steps=25")
    bench.call("resume", "moved", "--set=backend=native", "--set=train.steps=40")
    differences = compared(bench, "native", "moved")
    assert differences["verdict"] == "match"
    assert differences["steps_compared"] == 40

    # The same by files that were converted offline and lie in the checkpoint's place.
    submit("converted", "native", 10)
    replace(bench, "converted", 10, "--to=nxd", "--tensor=1", "--pipeline=1", "--data=2")
    bench.call("resume", "converted", "--set=backend=nxd", "--set=train.steps=20")
    replace(bench, "converted", 20, "--to=native")
    bench.call("resume", "converted", "--set=backend=native", "--set=train.steps=40")
    differences = compared(bench, "native", "converted")
    assert differences["verdict"] == "match"
    assert differences["steps_compared"] == 40


def replace(bench: Bench, run: str, step: int, *how: str) -> None:
    """Put a converted checkpoint in the place of a run's."""
    out = bench.runs.parent / f"{run}-{step}"
    bench.call("checkpoint", "convert", str(step), f"--run={run}", *how, f"--out={out}")
    there = bench.runs / run / "checkpoints" / f"step_{step:08d}"
    assert (there / LAYOUT).is_file() != (out / LAYOUT).is_file()
    shutil.rmtree(there)
    out.rename(there)
