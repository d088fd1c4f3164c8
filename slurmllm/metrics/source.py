"""Reads whatever holds metrics as a curve, by what it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slurmllm.errors import RunError
from slurmllm.metrics.curves import Curve
from slurmllm.metrics.tags import parse_tags
from slurmllm.rundir import RunDir, find_run

__all__ = ["locate", "parse_tags", "read_curve"]

_JSON_LINES = (".jsonl", ".ndjson")
_TABLES = (".csv", ".tsv")
_TEXTS = (".log", ".txt", ".out", ".err")
# Of the Hugging Face Trainer's checkpoints, and of Lightning's CSVLogger
_LOGS_IN_FOLDERS = ("trainer_state.json", "metrics.csv")
_KINDS = (
    "a run's name or directory, a TensorBoard event file or a folder of them, or a .jsonl, .json, "
    ".csv, .tsv, .log, .txt or .out file"
)


def locate(source: str, root: Path) -> Path:
    """Resolve an argument of the command line: a run's name, or any file or folder of metrics.

    A folder with metrics but without config.yaml is accepted: a run copied in part.

    Args:
        source: The argument.
        root: The folder of all runs.

    Raises:
        RunError: it is none of these.
    """
    from slurmllm.metrics.log_series import log_suffix
    from slurmllm.metrics.tensorboard_logs import event_files, event_folders, is_event_file

    if not source.strip():  # an unset variable of a script; as a path it is the folder itself
        raise RunError(f"an empty name is no run; give {_KINDS}")
    path = Path(source)
    try:
        if path.is_file():
            return path
        is_log = is_event_file(path) or (
            log_suffix(path) in (*_JSON_LINES, ".json", *_TABLES, *_TEXTS)
        )
        if path.suffix and is_log and not (root / path).exists() and not path.exists():
            raise RunError(f"no metrics file {path.absolute()}; give a {path.suffix} file or a run")
        for folder in (root / source, path):
            if (folder / "config.yaml").is_file():
                return find_run(source, root).path
        for folder in (root / source, path):
            if folder.is_dir() and (
                (folder / "metrics").is_dir()
                or event_files(folder)
                or event_folders(folder, limit=1)
            ):
                return folder
        for name in _LOGS_IN_FOLDERS:
            if (path / name).is_file():
                return path / name
        if path.is_dir():
            raise RunError(
                f"{path} holds no metrics: neither metrics/attempt_NNN.jsonl nor TensorBoard "
                f"event files; give {_KINDS}"
            )
        return find_run(source, root).path
    except OSError as error:
        raise RunError(
            f"cannot look up {source:.200}: {error.strerror or error}; give {_KINDS}"
        ) from error


def read_curve(
    source: Path, tags: Mapping[str, str] | None = None, *, lenient: bool = False
) -> Curve:
    """Read the metrics of a run, or the log of another framework.

    Args:
        source: A run directory, an event file, a folder of these, or a file of rows or lines.
        tags: Metric → the tag, column or key that holds it, in preference to the known names.
        lenient: In our own files, skip broken lines with a warning.

    Raises:
        RunError: there are no metrics, none of them is the loss, a file cannot be read, or a
            line of one of our files that is not its last is broken (if not lenient).
    """
    try:
        if source.is_file():
            return _read_file(source, tags or {}, lenient)
        return _read_folder(source, tags or {}, lenient)
    except OSError as error:
        raise RunError(
            f"cannot read {error.filename or source}: {error.strerror or error}; a log must be "
            "readable: check its permissions and the file system"
        ) from error


def _read_folder(source: Path, tags: Mapping[str, str], lenient: bool) -> Curve:
    """Read a run's metrics; its event files if it has no metrics; or another's event files."""
    from slurmllm.metrics.run_curve import read_run, run_name
    from slurmllm.metrics.tensorboard_logs import event_files, read_tensorboard

    run = RunDir(source)
    if run.metrics_files() or not source.is_dir():
        return read_run(source, lenient)
    own_events = run.tensorboard.is_dir()
    # NeMo and Hydra write a config.yaml next to their event files too.
    foreign = not own_events and event_files(source)
    is_run = not foreign and ((source / "config.yaml").is_file() or (source / "metrics").is_dir())
    if is_run and not (own_events and event_files(run.tensorboard)):
        return read_run(source, lenient)  # raises: there are no metrics yet
    return read_tensorboard(run.tensorboard if is_run else source, run_name(source, False), tags)


def _read_file(source: Path, tags: Mapping[str, str], lenient: bool) -> Curve:
    from slurmllm.metrics import tabular_logs, tensorboard_logs, text_logs
    from slurmllm.metrics.log_series import curve_of_log, log_suffix
    from slurmllm.metrics.run_curve import read_run, run_name

    suffix = log_suffix(source)
    if tensorboard_logs.is_event_file(source):
        return tensorboard_logs.read_tensorboard(source, source.absolute().parent.name, tags)
    if suffix in _JSON_LINES and source.suffix != ".gz" and _is_own_file(source, tags):
        return read_run(source, lenient)
    if suffix in _JSON_LINES:
        log = tabular_logs.read_json_lines(source, tags)
    elif suffix == ".json":
        log = tabular_logs.read_json(source, tags)
    elif suffix in _TABLES:
        log = tabular_logs.read_table(source, tags)
    elif suffix in _TEXTS:
        log = text_logs.read_text(source, tags)
    else:
        raise RunError(f"{source} is of an unknown kind ({suffix or 'no suffix'}); give {_KINDS}")
    return curve_of_log(log, run_name(source, True), tags)


def _is_own_file(path: Path, tags: Mapping[str, str]) -> bool:
    """Whether slurmllm wrote a file: by its folder, else by the keys of its first whole row."""
    from slurmllm.metrics.row_reader import parse_row
    from slurmllm.metrics.tags import choose_tags

    if path.absolute().parent.name == "metrics":
        return True
    with path.open("rb") as stream:
        for _, line in zip(range(100), stream, strict=False):
            row = parse_row(line)
            if isinstance(row, dict):
                if "attempt" in row:
                    return True
                if type(row.get("step")) is not int or "loss" not in row:
                    return False
                if any(tag in row for tag in tags.values()):
                    return False
                chosen = choose_tags(dict.fromkeys(row, 1), {}, path).tags
                return all(metric == tag for metric, tag in chosen.items())
    return True
