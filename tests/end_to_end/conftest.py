"""A folder of runs for all end-to-end tests, and the scenes on a real Slurm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from end_to_end.bench import LEAN, REHEARSED, SMALL, Bench
from end_to_end.scenes import CLUSTER, CONF, SceneBench, Scenes, scenes_of


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with Bench(tmp_path_factory.mktemp("end_to_end") / "runs") as bench:
        yield bench


@pytest.fixture(scope="session")
def rehearsed(bench: Bench, inputs: tuple[str, ...]) -> str:
    """The unbroken rehearsed run on this machine, of two nodes and both stages."""
    run = ("submit", "tiny_neox", "--nodes=2", "--local", *SMALL, *LEAN, *REHEARSED, *inputs)
    bench.call(*run, "--name=rehearsed", "--precompile=always")
    return "rehearsed"


@pytest.fixture(scope="session")
def scenes(
    new_cluster: Callable[[Path], Any],
    request: pytest.FixtureRequest,
    inputs: tuple[str, ...],
    tmp_path_factory: pytest.TempPathFactory,
) -> Scenes:
    """The scenes of all selected tests, played on one cluster."""
    folder = tmp_path_factory.mktemp("scenes")
    (folder / "conf").write_text(CONF)
    cluster, shared = new_cluster(folder / "state"), folder / "shared"
    with pytest.MonkeyPatch.context() as patch:
        for name in ("SLURMLLM_RUNS", "SLURMLLM_CLUSTER", "SLURM_JOB_ID"):
            patch.delenv(name, raising=False)
        patch.setenv("SLURMLLM_CONFIG", "/nonexistent/slurmllm.yaml")
        cluster.call("up", f"--conf={folder}/conf", f"--shared={shared}", *CLUSTER)
        try:
            patch.setenv("SLURM_CONF", cluster.slurm_conf)
            stage = SceneBench(cluster, folder / "runs", shared, inputs)
            return Scenes(stage, scenes_of(request.session))
        finally:
            cluster.call("down")
