"""Reads the metrics of a run directory, or a single file of them, with the run's settings."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
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

_CLUSTER_SETTINGS = ("name", "device", "instance_type")


def read_run(source: Path, lenient: bool = False) -> Curve:
    """Read a run directory's metrics, or a single .jsonl file of them.

    Args:
        source: The directory or the file.
        lenient: Skip broken lines with a warning.

    Raises:
        RunError: there are no metrics, a file cannot be read or, if not lenient, a line before
            the last is broken.
    """
    try:
        is_file = source.is_file()
        files = [source] if is_file else RunDir(source).metrics_files()
        warnings = [] if is_file else _unknown_files(source / "metrics", files)
    except OSError as error:
        raise read_error(source, error) from error
    name = run_name(source, is_file)
    blocks, of_rows = read_attempts(files, lenient)
    warnings += of_rows
    if not blocks:
        what = f"{source / 'metrics'} holds no attempt_NNN.jsonl"
        if files:
            what = f"{', '.join(str(path) for path in files)} without one whole row"
        raise RunError(
            f"no metrics of {name}: {what}; they begin with the run's first step: see "
            f"`slurmllm status {name}` and its logs"
            + "".join(f" ({warning})" for warning in warnings)
        )
    path = source.absolute()
    of_run = not is_file or path.parent.name == "metrics"
    run = RunDir(path.parent.parent if is_file else source)
    data, skips = None, SkipsRecord()
    try:
        data = DataRecord.load(run.data) if run.data.is_file() else None
        skips = SkipsRecord.load(run.skips) if run.skips.is_file() else skips
    except StorageError as error:
        warnings.append(str(error))
    curve = merge_rows(
        blocks,
        name=name,
        path=source,
        kind="run" if of_run else "jsonl",
        warnings=warnings,
        skips=skips.skips,
    )
    if not of_run:
        return replace(curve, data=data)
    later: list[str] = []
    return replace(
        curve,
        data=data,
        settings=_read_settings(run, later),
        nodes=_read_nodes(run, later),
        warnings=(*curve.warnings, *later),
    )


def run_name(source: Path, is_file: bool) -> str:
    """Returns a run's name, or a file's: `RUN.attempt_NNN` for one of a run's metrics files."""
    path = source.absolute() if source.name not in ("", "..") else source.resolve()
    if is_file and path.parent.name == "metrics":
        return f"{path.parent.parent.name}.{path.stem}"
    return path.stem if is_file else path.name


def _unknown_files(folder: Path, known: list[Path]) -> list[str]:
    """Warn if the metrics folder has files that this version does not know."""
    if not folder.is_dir():
        return []
    names = {entry.name for entry in folder.iterdir() if not entry.name.startswith(".")}
    unknown = sorted(names - {path.name for path in known})
    if not unknown:
        return []
    more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
    return [
        f"{folder}: ignoring {', '.join(unknown[:3])}{more}; metrics are attempt_NNN.jsonl: "
        "the file may be of a newer version of slurmllm"
    ]


def _read_settings(run: RunDir, warnings: list[str]) -> dict[str, Setting]:
    """Read the recipe of a run, flat, and the versions of the software that it ran with.

    The file is read as stored, not validated: another version may have written it.

    Returns:
        Dotted path in the recipe → value, with `cluster.name`, `cluster.device` and
        `versions.torch` and the like; empty without config.yaml.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    settings: dict[str, Setting] = {}
    config = _read_mapping(run.config, lambda text: yaml.load(text, Loader=loader), warnings)
    for key, value in config.items():
        if key == "cluster" and isinstance(value, dict):
            value = {name: value.get(name) for name in _CLUSTER_SETTINGS}
        elif key in ("origin", "cluster"):
            continue
        _flatten(str(key), value, settings)
    versions = _read_mapping(run.graphs_manifest, json.loads, warnings).get("versions")
    _flatten("versions", versions if isinstance(versions, dict) else {}, settings)
    return settings


def _read_nodes(run: RunDir, warnings: list[str]) -> dict[int, tuple[str, ...]]:
    nodes: dict[int, tuple[str, ...]] = {}
    try:
        attempts = run.attempts("train")
    except OSError as error:
        warnings.append(f"cannot read {error.filename or run.path}: {error.strerror or error}")
        return nodes
    for attempt in attempts:
        names = _read_mapping(attempt.record, json.loads, warnings).get("nodes")
        if isinstance(names, list) and all(isinstance(node, str) for node in names):
            nodes[attempt.number] = tuple(names)
    return nodes


def _flatten(path: str, value: Any, into: dict[str, Setting]) -> None:
    """Store a value under its dotted path; a list as its JSON text."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _flatten(f"{path}.{key}", inner, into)
    elif value is None or isinstance(value, str | int | float | bool):
        into[path] = value
    else:
        into[path] = json.dumps(value, default=str)


def _read_mapping(
    path: Path, parse: Callable[[bytes], Any], warnings: list[str]
) -> Mapping[Any, Any]:
    """Read a file that holds a mapping; empty without the file, or with a warning if damaged."""
    import yaml

    try:
        if not path.is_file():
            return {}
        found = parse(path.read_bytes())
    except OSError as error:
        warnings.append(f"cannot read {path}: {error.strerror or error}")
        return {}
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())  # YAML's messages span several lines
        warnings.append(f"{path} is damaged: {reason:.200}; ignoring it")
        return {}
    if not isinstance(found, dict):
        warnings.append(f"{path} is damaged: a {type(found).__name__}, not a mapping; ignoring it")
        return {}
    return found
