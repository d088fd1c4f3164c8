"""The profile that a calibration writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from calibrate.test_fits import TRUTH
from slurmllm.calibrate.run import Calibration, write_profile
from slurmllm.config.profiles import available
from slurmllm.config.resolve import clusters_dir, resolve
from slurmllm.errors import ConfigError, StorageError

FOUND = Calibration(TRUTH, ("n1",), (), 60.0)


@pytest.mark.parametrize("name", available(clusters_dir()))
def test_it_is_the_given_one_with_other_figures(tmp_path: Path, name: str) -> None:
    request, path = resolve("tiny_neox", name).cluster, tmp_path / "mine.yaml"
    write_profile(request, FOUND, path)
    assert resolve("tiny_neox", str(path)).cluster == request.model_copy(update={"hardware": TRUTH})


def test_values_of_set_are_written(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    request = resolve("tiny_neox", "local", ["cluster.devices_per_node=4"]).cluster
    write_profile(request, FOUND, path)
    assert resolve("tiny_neox", str(path)).cluster.devices_per_node == 4


def test_a_file_is_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("mine")
    request = resolve("tiny_neox", "local").cluster
    with pytest.raises(ConfigError, match="exists and is not overwritten"):
        write_profile(request, FOUND, path)
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("mine.json", "ends in .yaml"),
        ("absent/mine.yaml", "no folder"),
        ("folder.yaml", "exists"),
        (str(clusters_dir() / "local.yaml"), "ship with slurmllm"),
        (str(clusters_dir() / "new.yaml"), "ship with slurmllm"),
    ],
)
def test_where_none_is_written(tmp_path: Path, target: str, message: str) -> None:
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(ConfigError, match=message):
        write_profile(resolve("tiny_neox").cluster, FOUND, tmp_path / target)


def test_a_disk_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StorageError, match="No space left"):
        write_profile(resolve("tiny_neox").cluster, FOUND, tmp_path / "mine.yaml")
    assert list(tmp_path.iterdir()) == []
