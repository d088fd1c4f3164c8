"""A run's own metrics, or a single file of them, as a curve; a run writes one file an attempt."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from slurmllm.errors import RunError, StorageError
from slurmllm.metrics.attempt_metrics import read_attempts
from slurmllm.metrics.curves import Curve, Setting
from slurmllm.metrics.merge import merge_rows
from slurmllm.metrics.row_reader import read_error
from slurmllm.records import DataRecord, SkipsRecord
from slurmllm.rundir import RunDir


def read_run(source: Path, lenient: bool = False) -> Curve:
    """Read a run directory's metrics, or a single .jsonl file of them.

    Args:
        source: The directory or the file.
        lenient: Leave broken lines out with a warning.

    Raises:
        RunError: there are no metrics, a file cannot be read or, if not lenient, a line before
            the last is broken.
    """
    warnings: list[str] = []
    try:
        is_file = source.is_file()
        files = [source] if is_file else RunDir(source).metrics_files()
        warnings += [] if is_file else _unknown_files(source, files)
    except OSError as error:
        raise read_error(source, error) from error
    name = run_name(source, is_file)
    if not files:
        raise RunError(
            f"no metrics of {name}: {source / 'metrics'} holds no attempt_NNN.jsonl; they begin "
            f"with the run's first step: see `slurmllm status {name}` and its logs"
            + "".join(f" ({warning})" for warning in warnings)
        )
    parts, left_out = read_attempts(files, lenient)
    warnings += left_out
    if not parts:
        raise RunError(
            f"no metrics of {name}: {', '.join(str(path) for path in files)} without one whole "
            f"row; they begin with the run's first step: see `slurmllm status {name}` and its logs"
            + "".join(f" ({warning})" for warning in warnings)
        )
    whose = source.absolute().parent.parent if is_file else source
    of_run = not is_file or source.absolute().parent.name == "metrics"
    run = RunDir(whose)
    data, skips = None, SkipsRecord()
    try:
        data = DataRecord.load(run.data) if run.data.is_file() else None
        skips = SkipsRecord.load(run.skips) if run.skips.is_file() else skips
    except StorageError as error:
        warnings.append(str(error))
    curve = merge_rows(
        parts,
        name=name,
        path=source,
        kind="run" if of_run else "jsonl",
        warnings=warnings,
        skips=skips.skips,
    )
    if not of_run:
        return replace(curve, data=data)
    settings, of_settings = read_settings(run)
    nodes, of_nodes = read_nodes(run)
    return replace(
        curve,
        data=data,
        settings=settings,
        nodes=nodes,
        warnings=(*curve.warnings, *of_settings, *of_nodes),
    )


def run_name(source: Path, is_file: bool) -> str:
    """A run's name, or a file's; the run's before it where the file is one of a run's attempts."""
    path = source.absolute() if source.name not in ("", "..") else source.resolve()
    if is_file and path.parent.name == "metrics":
        return f"{path.parent.parent.name}.{path.stem}"
    return path.stem if is_file else path.name


def _unknown_files(source: Path, known: list[Path]) -> list[str]:
    """A warning where the metrics folder holds files that this version does not know."""
    folder = source / "metrics"
    if not folder.is_dir():
        return []
    names = {entry.name for entry in folder.iterdir() if not entry.name.startswith(".")}
    strange = sorted(names - {path.name for path in known})
    if not strange:
        return []
    more = f" and {len(strange) - 3} more" if len(strange) > 3 else ""
    return [
        f"{folder}: {', '.join(strange[:3])}{more} passed over; metrics are attempt_NNN.jsonl: "
        "the file may be of a newer version of slurmllm"
    ]


_NOT_RECIPE = ("origin", "cluster")
_KEPT_OF_CLUSTER = ("name", "device", "instance_type")


def read_settings(run: RunDir) -> tuple[dict[str, Setting], list[str]]:
    """The recipe of a run, flat, and the versions of what it ran on.

    Returns:
        Dotted path in the recipe → value, with `cluster.name`, `cluster.device` and
        `versions.torch` and the like; and warnings that name a file that cannot be read. Both
        empty where there is no config.yaml.
    """
    settings: dict[str, Setting] = {}
    warnings: list[str] = []
    config = _config(run.config, warnings)
    for key, value in config.items():
        if key not in _NOT_RECIPE:
            _flatten(str(key), value, settings)
    cluster = config.get("cluster")
    if isinstance(cluster, dict):
        for key in _KEPT_OF_CLUSTER:
            _flatten(f"cluster.{key}", cluster.get(key), settings)
    manifest = _json(run.graphs_manifest, warnings)
    versions = manifest.get("versions")
    _flatten("versions", versions if isinstance(versions, dict) else {}, settings)
    return settings, warnings


def read_nodes(run: RunDir) -> tuple[dict[int, tuple[str, ...]], list[str]]:
    """The nodes of each attempt, and warnings that name a record that cannot be read."""
    nodes: dict[int, tuple[str, ...]] = {}
    warnings: list[str] = []
    try:
        attempts = run.attempts("train")
    except OSError as error:
        return nodes, [f"cannot read {error.filename or run.path}: {error.strerror or error}"]
    for attempt in attempts:
        named = _json(attempt.record, warnings).get("nodes")
        if isinstance(named, list) and all(isinstance(node, str) for node in named):
            nodes[attempt.number] = tuple(named)
    return nodes, warnings


def _flatten(path: str, value: Any, into: dict[str, Setting]) -> None:
    """Put a value under its dotted path; a list becomes its JSON text."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _flatten(f"{path}.{key}", inner, into)
    elif value is None or isinstance(value, str | int | float | bool):
        into[path] = value
    else:
        into[path] = json.dumps(value, default=str)


def _config(path: Path, warnings: list[str]) -> Mapping[Any, Any]:
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        if not path.is_file():
            return {}
        config = yaml.load(path.read_bytes(), Loader=loader)
    except OSError as error:
        warnings.append(f"cannot read {path}: {error.strerror or error}")
        return {}
    except (yaml.YAMLError, ValueError) as error:
        first = " ".join(str(error).split())
        warnings.append(f"{path} is damaged: {first:.200}; the run's settings are not known")
        return {}
    if not isinstance(config, dict):
        warnings.append(f"{path} is damaged: no mapping; the run's settings are not known")
        return {}
    return config


def _json(path: Path, warnings: list[str]) -> Mapping[str, Any]:
    try:
        if not path.is_file():
            return {}
        found = json.loads(path.read_bytes())
    except OSError as error:
        warnings.append(f"cannot read {path}: {error.strerror or error}")
        return {}
    except (ValueError, RecursionError) as error:
        warnings.append(f"{path} is damaged: {error!s:.200}")
        return {}
    if not isinstance(found, dict):
        warnings.append(f"{path} is damaged: a JSON {type(found).__name__}, not an object")
        return {}
    return found
