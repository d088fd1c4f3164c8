from collections.abc import Callable
from pathlib import Path

import pytest

from slurmllm.core.run.rundir import RunDir
from train.gang import Gang, make_data, make_run

# Long enough to be broken off in the middle, and the unbroken run to compare with.
LONG = ("train.steps=60", "checkpoint.every_steps=10")


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture
def new_run(tmp_path: Path, data: tuple[str, str]) -> Callable[..., RunDir]:
    """overrides → run directory."""
    return lambda *overrides: make_run(tmp_path / "run", data, *overrides)


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory, data: tuple[str, str]) -> RunDir:
    """A run on two workers from step 0 to the last."""
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    return Gang(make_run(folder, data, "cluster.devices_per_node=2", *LONG), world=2).finish()
