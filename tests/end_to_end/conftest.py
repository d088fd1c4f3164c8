"""A folder of runs for all end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from end_to_end.bench import LEAN, REHEARSED, SMALL, Bench
from end_to_end.slurm_runs import Cluster, submit, wait


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with Bench(tmp_path_factory.mktemp("end_to_end") / "runs") as bench:
        yield bench


@pytest.fixture
def rehearsed_on_slurm(slurm: Cluster, bench: Bench, inputs: tuple[str, ...]) -> str:
    """The unbroken rehearsed run on Slurm, for all files of this process."""
    if not (bench.runs / "undisturbed").is_dir():
        submit(bench, inputs, "undisturbed", *REHEARSED, "--precompile=always")
    wait(bench, "undisturbed", "done")
    return "undisturbed"


@pytest.fixture(scope="session")
def rehearsed(bench: Bench, inputs: tuple[str, ...]) -> str:
    """The unbroken rehearsed run on this machine, of two nodes and both stages."""
    run = ("submit", "tiny_neox", "--nodes=2", "--local", *SMALL, *LEAN, *REHEARSED, *inputs)
    bench.call(*run, "--name=rehearsed", "--precompile=always")
    return "rehearsed"
