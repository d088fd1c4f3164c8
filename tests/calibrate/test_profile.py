"""The profile that a calibration writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from calibrate.test_fits import TRUTH
from slurmllm.calibrate.run import Calibration, write_profile
from slurmllm.config.resolve import clusters_dir, resolve
from slurmllm.errors import ConfigError, StorageError

FOUND = Calibration(TRUTH, ("n1",), (), 60.0)


@pytest.mark.parametrize("name", ["trn1", "p5"])
def test_it_is_the_given_one_with_other_figures(tmp_path: Path, name: str) -> None:
    request = resolve("tiny_neox", name, ["cluster.devices_per_node=4"]).cluster
    path = tmp_path / "mine.yaml"
    write_profile(request, FOUND, path)
    assert resolve("tiny_neox", str(path)).cluster == request.model_copy(update={"hardware": TRUTH})


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("mine.json", "ends in .yaml"),
        ("absent/mine.yaml", "no folder"),
        ("folder.yaml", "exists and is not overwritten"),
        (str(clusters_dir() / "local.yaml"), "ship with slurmllm"),
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
