"""Curves of run directories, metrics files and logs of other frameworks."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from slurmllm.core.errors import RunError, StorageError
from slurmllm.core.format import format_names
from slurmllm.core.metrics.curves import Convention, Curve, Setting
from slurmllm.core.metrics.event_files import event_files, event_folders, is_event_file
from slurmllm.core.metrics.log_curve import curve_of_log
from slurmllm.core.metrics.log_files import (
    is_log,
    read_events,
    read_file,
    read_split_log,
    split_log_files,
)
from slurmllm.core.metrics.log_series import Log, log_suffix
from slurmllm.core.metrics.merge import FileRows, merge_rows, number_attempts, with_evaluations
from slurmllm.core.metrics.row_reader import parse_row, read_evaluations, reading
from slurmllm.core.metrics.tags import JSON_LINES, Tags, parse_tags
from slurmllm.core.run.artifact_records import DataRecord
from slurmllm.core.run.records import JobsRecord, SkipsRecord
from slurmllm.core.run.rundir import RunDir, find_run, read_all, report_path, storage_errors
from slurmllm.core.run.safe_files import open_regular, os_error_text, read_limited, read_lines

__all__ = ["locate", "parse_tags", "read_curve"]

# Of the Hugging Face Trainer's checkpoints, Lightning's CSVLogger and llm.c
_LOGS_IN_FOLDERS = ("trainer_state.json", "metrics.csv", "main.log")
_CLUSTER_SETTINGS = ("name", "device", "devices_per_node", "instance_type")
_KINDS = (
    "a run's name or directory, a TensorBoard event file or a folder of them, or a .jsonl, .json, "
    ".csv, .tsv, .log, .txt or .out file"
)


def locate(source: str, root: Path) -> Path:
    """Resolve an argument of the command line: a run's name, or any file or folder of metrics.

    A folder with metrics but without config.yaml is accepted: an incomplete copy of a run. Raises
    RunError if it is none of these.
    """
    if not source.strip():  # an unset variable of a script; as a path it is the folder itself
        raise RunError(f"an empty name is not a run; give {_KINDS}")
    path = Path(source)
    with storage_errors(f"cannot look up {source:.200}", f"give {_KINDS}", RunError):
        refuse_removed_format(path)
        if path.is_file():
            return path
        if path.suffix and is_log(path) and not (path.exists() or (root / path).exists()):
            raise RunError(f"no metrics file {path.absolute()}; give a {path.suffix} file or a run")
        for folder in (root / source, path):
            if (folder / "config.yaml").is_file():
                return find_run(source, root).path
        for folder in (root / source, path):
            if folder.is_dir() and (
                (folder / "metrics").is_dir()
                or event_files(folder)
                or event_folders(folder, limit=1)
                or split_log_files(folder)
            ):
                return folder
        for name in _LOGS_IN_FOLDERS:
            if (path / name).exists():
                return path / name
        if path.is_dir():
            raise RunError(
                f"{path} holds no metrics: neither metrics/attempt_NNN.jsonl nor TensorBoard "
                f"event files; give {_KINDS}"
            )
        return find_run(source, root).path


def refuse_removed_format(path: Path) -> None:
    """Raise RunError for the trackers' own files, which earlier versions read."""
    way = ""
    if ".wandb" in path.suffixes or next(path.glob("run-*.wandb"), None) is not None:
        way = "W&B's run files: wandb.Api().run('ENTITY/PROJECT/ID').scan_history()"
    elif (path / "meta.yaml").is_file() and (path / "metrics").is_dir():
        way = "MLflow's file store: mlflow.MlflowClient().get_metric_history(RUN_ID, 'loss')"
    if way:
        raise RunError(
            f"{path}: slurmllm no longer reads {way.replace(': ', '; export the metrics to CSV: ')}"
            " has the rows"
        )


# Folders that logging libraries name
_FOLDER = re.compile(r"tb|tensorboard|((lightning|tb|tf)_)?logs?|events|runs|version_\d+|metrics")


def read_curve(
    source: Path,
    tags: Tags | None = None,
    *,
    lenient: bool = False,
    pattern: str | None = None,
    where: Mapping[str, str] | None = None,
    by_file: FileRows | None = None,
) -> Curve:
    """Read the metrics of a run, or the log of another framework.

    Args:
        source: A run directory, an event file, a folder of these, or a file of rows or lines.
        tags: Metric → the tag, column or key that holds it, in preference to the known names.
        lenient: In our own files, skip broken lines with a warning.
        pattern: Regular expression of a text log's lines, with a named group for each metric.
        where: Of another framework's log: column → the value that it must have in the rows to read.
        by_file: Filled with what was read of each of our own files, for a second reader.

    Raises:
        RunError: there are no metrics, none of them is the loss, a file cannot be read, or a
            line of one of our files that is not its last is broken (if not lenient).
    """
    tags = tags or {}
    with reading(source, "log"):
        log = read_log(source, tags, pattern)
        if log is None:
            return read_run(source, lenient, by_file)
        return curve_of_log(log, run_name(log.path, source.is_file()), tags, where)


def read_log(source: Path, tags: Tags, pattern: str | None) -> Log | None:
    """Read a log of another framework; None if it is one of ours. Raises also OSError."""
    refuse_removed_format(source)
    if not source.is_file():
        return _read_folder(source, tags)
    if pattern is not None:
        return read_file(source, tags, pattern)
    if is_event_file(source):
        return read_events(source, tags)
    if source.suffix in JSON_LINES and _is_own_file(source):
        return None
    if not is_log(source):
        suffix = log_suffix(source) or "no suffix"
        raise RunError(f"{source} is of an unknown kind ({suffix}); give {_KINDS}")
    return read_file(source, tags)


def _read_folder(source: Path, tags: Tags) -> Log | None:
    """Read a folder of another framework, or a run's event files; None if it has metrics files."""
    run = RunDir(source)
    if run.metrics_files() or not source.is_dir():
        return None
    events = event_files(source)
    is_run = run.config.is_file() or (source / "metrics").is_dir()
    if is_run and run.tensorboard.is_dir():
        source = run.tensorboard
        events = event_files(run.tensorboard)
    # NeMo and Hydra write a config.yaml next to their event files too.
    if is_run and not events:
        return None
    if not events and split_log_files(source):
        return read_split_log(source, tags)
    return read_events(source, tags)


def _is_own_file(path: Path) -> bool:
    """Return whether slurmllm wrote a file: by its folder, else by its first whole row."""
    if path.absolute().parent.name == "metrics" and path.name.startswith("attempt_"):
        return True
    with open_regular(path) as stream:
        rows = (parse_row(line) for line in islice(read_lines(stream), 100))
        row = next((row for row in rows if isinstance(row, dict)), {})
    return "attempt" in row


def read_run(source: Path, lenient: bool = False, by_file: FileRows | None = None) -> Curve:
    """Read a run directory's metrics, or a .jsonl file of them; raises as `read_curve` does."""
    from slurmllm.core.metrics.attempt_metrics import read_attempts  # loads pyarrow

    with reading(source):
        is_file = source.is_file()
        if source.exists() and not is_file and not source.is_dir():
            raise RunError(f"{source} is not a regular file; write it to a file first")
        files = [source] if is_file else RunDir(source).metrics_files()
        warnings = [] if is_file else _unknown_files(source / "metrics", files)
    name = run_name(source, is_file)
    blocks, line_warnings = read_attempts(files, lenient, by_file)
    warnings += line_warnings
    if not blocks:
        reason = f"{source / 'metrics'} holds no attempt_NNN.jsonl"
        if files:
            reason = f"{', '.join(str(path) for path in files)} without one whole row"
        raise RunError(
            f"no metrics of {name}: {reason}; they begin with the run's first step: see "
            f"`slurmllm status {name}` and its logs"
            + "".join(f" ({warning})" for warning in warnings)
        )
    path = source.absolute()
    if is_file and path.parent.name != "metrics":
        blocks = number_attempts(blocks)
        return merge_rows(blocks, name=name, path=source, kind="jsonl", warnings=warnings)
    run = RunDir(path.parent.parent if is_file else source)
    records = _read_records(run, warnings)
    skips = records["skips"]
    settings = records["settings"]
    curve = merge_rows(blocks, name=name, path=source, kind="run", warnings=warnings, skips=skips)
    # Without evaluations, a file less is opened for each attempt. A copy may have no config.yaml.
    command = "command.run" in settings
    if not settings or command or settings.get("eval.every_steps") is not None:
        try:
            curve = with_evaluations(curve, read_evaluations(run, files), add_rows=command)
        except RunError as error:
            curve = replace(curve, warnings=(*curve.warnings, str(error)))
    return replace(curve, convention=Convention(name="slurmllm", steps_from=1), **records)


def _unknown_files(folder: Path, files: Sequence[Path]) -> list[str]:
    if not folder.is_dir():
        return []
    names = {entry.name for entry in folder.iterdir() if not entry.name.startswith(".")}
    unknown = sorted(names - {path.name for path in files})
    if not unknown:
        return []
    return [
        f"{folder}: ignoring {format_names(unknown, 3)}; metrics are attempt_NNN.jsonl: the file "
        "may be of a newer version of slurmllm"
    ]


def _read_records(run: RunDir, warnings: list[str]) -> dict[str, Any]:
    records: dict[str, Any] = {"data": None, "skips": (), "changes": {}, "nodes": {}}
    try:
        records["data"] = DataRecord.find(run.data)
        records["skips"] = SkipsRecord.of(run).skips
        records["changes"] = {s.first_attempt: s.changes for s in JobsRecord.of(run).submissions}
    except StorageError as error:
        warnings.append(str(error))
    records["settings"] = _read_settings(run, warnings)
    try:
        attempts = run.attempts("train")
        faults = list[str]()
        files = read_all(
            partial(_read_mapping, warnings=faults), [attempt.record for attempt in attempts]
        )
        warnings += sorted(faults)  # threads read them, in any order
        for attempt, record in zip(attempts, files, strict=True):
            names = record.get("nodes")
            if isinstance(names, list) and all(isinstance(node, str) for node in names):
                records["nodes"][attempt.number] = tuple(names)
    except OSError as error:
        warnings.append(f"cannot read {error.filename or run.path}: {os_error_text(error)}")
    return records


def run_name(source: Path, is_file: bool) -> str:
    """Return a run's name, or a file's: `RUN.attempt_NNN` for one of a run's metrics files."""
    path = source.absolute() if source.name not in ("", "..") else source.resolve()
    path = Path(str(path).encode(errors="replace").decode())  # only its names are used
    if is_file and is_event_file(path):
        path = path.parent
        is_file = False
    if is_file and path.parent.name == "metrics":
        return f"{path.parent.parent.name}.{path.stem}"
    if is_file and path.stem != "metrics":
        return path.stem
    # `tb/`, `lightning_logs/version_0/`: the name is that of a folder above.
    while is_file or (_FOLDER.fullmatch(path.name) and path.parent.name):
        path = path.parent
        is_file = False
    return path.name


def distinct_names(names: Sequence[str], paths: Sequence[Path]) -> list[str]:
    """Return the names of sources; of equal ones the shortest ends of their paths that differ."""
    parts = [str(path.absolute()).split("/") for path in paths]
    distinct = [*names]
    for index, source in enumerate(parts):
        namesakes = [
            path
            for path, name in zip(parts, names, strict=True)
            if name == names[index] and path != source
        ]
        length = 1
        while any(path[-length:] == source[-length:] for path in namesakes):
            length += 1
        if namesakes:
            distinct[index] = "/".join(source[-length:]).encode(errors="replace").decode()
    return distinct


def run_report(verb: str, curves: Sequence[Curve]) -> Path | None:
    """Return `reports/<verb>-<A>-<B>….png` of the first run; None if all curves are of logs."""
    run = next(
        (curve.path for curve in curves if curve.kind == "run" and curve.path.is_dir()), None
    )
    return None if run is None else report_path(verb, [curve.name for curve in curves], run)


def name_apart(curves: Sequence[Curve]) -> list[Curve]:
    """Return curves with names that differ, unless they are of one source."""
    names = distinct_names([curve.name for curve in curves], [curve.path for curve in curves])
    return [replace(curve, name=name) for curve, name in zip(curves, names, strict=True)]


def _read_settings(run: RunDir, warnings: list[str]) -> dict[str, Setting]:
    """Return the recipe of a run by dotted path, with `cluster.device`, `versions.torch`, …

    The file is read as stored, not validated: another version may have written it.
    """
    from slurmllm.core.config.yaml_source import flatten  # loads yaml

    settings = {**_read_mapping(run.config, warnings)}
    settings.pop("origin", None)
    cluster = settings.get("cluster")
    settings["cluster"] = (
        {name: cluster.get(name) for name in _CLUSTER_SETTINGS} if isinstance(cluster, dict) else {}
    )
    versions = _read_mapping(run.graphs_manifest, warnings).get("versions")
    if versions is None:  # it has no graphs: those of a node of the last attempt
        try:
            for attempt in run.attempts("train")[-1:]:
                for path in sorted(attempt.node("").parent.glob("*.json"))[:1]:
                    versions = _read_mapping(path, warnings).get("versions")
        except OSError as error:
            warnings.append(f"cannot read the attempts of {run.path}: {os_error_text(error)}")
    if isinstance(versions, dict):
        settings["versions"] = versions
    # A list as its JSON text.
    return {
        path: value if isinstance(value, Setting) else json.dumps(value, default=str)
        for path, value in flatten(settings).items()
        if value != {}
    }


def _read_mapping(path: Path, warnings: list[str]) -> Mapping[Any, Any]:
    """Read a YAML or JSON file; empty without the file, or with a warning if it is damaged."""
    import yaml  # other frameworks' logs need none

    from slurmllm.core.config.yaml_source import LARGEST_YAML, parse_yaml

    try:
        if path.suffix == ".json":
            content = json.loads(read_limited(path))
        else:
            content = parse_yaml(read_limited(path, LARGEST_YAML).decode())
        if isinstance(content, dict):
            return content
        fault = f"a {type(content).__name__}, not a mapping"
    except FileNotFoundError:
        return {}
    except OSError as error:
        warnings.append(f"cannot read {path}: {os_error_text(error)}")
        return {}
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        fault = " ".join(str(error).split())  # YAML's messages span several lines
    warnings.append(f"{path} is damaged: {fault:.200}; ignoring it")
    return {}
