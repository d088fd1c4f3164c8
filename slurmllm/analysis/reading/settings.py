"""What a run directory tells of how the run was trained, beside its metrics.

The files are read as plain YAML and JSON, without the checks of this version's models: a run of a
newer or older version has other fields, and those that are there still tell something.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmllm.analysis.curves import Setting
from slurmllm.rundir import RunDir

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
