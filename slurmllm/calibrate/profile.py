"""A cluster profile with measured figures: the one given, its `hardware` section replaced."""

from __future__ import annotations

from pathlib import Path

from slurmllm import shipped
from slurmllm.calibrate.run import Calibration
from slurmllm.config.cluster import Cluster
from slurmllm.config.yaml_source import write_yaml
from slurmllm.errors import ConfigError
from slurmllm.rundir import write_atomic


def check_target(path: Path, *, replace: bool = False) -> None:
    """Whether a profile may be written there: to be asked before two minutes are spent.

    Args:
        path: Of the profile.
        replace: Whether a file that is there may be overwritten.

    Raises:
        ConfigError: the path does not end in .yaml, is a shipped profile, exists and may not be
            replaced, or lies in no folder.
    """
    said = f"--out {path}"
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{said}: a profile's name ends in .yaml; choose such a one")
    if path.resolve().parent == shipped.clusters_dir().resolve():
        raise ConfigError(
            f"{said}: the profiles that ship with slurmllm are not written to; choose a file of "
            "your own and name it with --cluster"
        )
    if path.is_dir() or (path.exists() and not replace):
        raise ConfigError(f"{said}: exists and is not overwritten; choose another name")
    if not path.resolve().parent.is_dir():
        raise ConfigError(f"{said}: there is no folder {path.resolve().parent}; make it first")


def profile_text(cluster: Cluster, calibration: Calibration) -> str:
    """The YAML of a profile with the measured figures in place of its own.

    Args:
        cluster: The profile that the nodes were taken to be of.
        calibration: What was measured on them.
    """
    measured = cluster.model_copy(update={"hardware": calibration.hardware})
    values = measured.model_dump(mode="json", exclude_unset=True)
    values["hardware"] = calibration.hardware.model_dump(mode="json")
    return f"# {calibration.hardware.source}\n" + write_yaml(values)


def write_profile(
    cluster: Cluster, calibration: Calibration, path: Path, *, replace: bool = False
) -> None:
    """Write such a profile, whole or not at all; `--cluster PATH` reads it.

    Raises:
        ConfigError: as `check_target` does.
        StorageError: the file system refused.
    """
    check_target(path, replace=replace)
    write_atomic(path, profile_text(cluster, calibration))
