"""A folder of runs and something to read, for all end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from end_to_end.bench import REHEARSED, SMALL, Bench
from end_to_end.slurm_runs import Cluster, submit, wait


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The standard library's texts, built once for all runs, as --set options."""
    from slurmllm.corpus.builtin import ensure_stdlib

    corpus, tokenizer = ensure_stdlib(tmp_path_factory.mktemp("stdlib"))
    return (f"--set=data.corpus={corpus}", f"--set=data.tokenizer={tokenizer}")


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with Bench(tmp_path_factory.mktemp("end_to_end") / "runs") as bench:
        yield bench


@pytest.fixture
def rehearsed_on_slurm(slurm: Cluster, bench: Bench, inputs: tuple[str, ...]) -> str:
    """The unbroken rehearsed run on Slurm, for all files of this process."""
    if not (bench.runs / "undisturbed").is_dir():
        submit(bench, inputs, "undisturbed", *REHEARSED)
    wait(bench, "undisturbed", "done")
    return "undisturbed"


@pytest.fixture(scope="session")
def rehearsed(bench: Bench, inputs: tuple[str, ...]) -> str:
    """The unbroken rehearsed run on this machine, of two nodes."""
    run = ("submit", "tiny_neox", "--nodes=2", "--local", *SMALL, *REHEARSED, *inputs)
    bench.call(*run, "--name=rehearsed")
    return "rehearsed"
