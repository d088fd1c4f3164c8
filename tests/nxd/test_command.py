"""Whole runs through the command line, on the real NxD: alone, and changing between backends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from end_to_end.bench import SMALL, Bench

from nxd.conftest import nxd_environment

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
