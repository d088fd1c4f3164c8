"""Whatever holds metrics, as a curve."""

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
# Of the Hugging Face Trainer's checkpoints, and of Lightning's CSVLogger
_LOG_OF_FOLDER = ("trainer_state.json", "metrics.csv")
_TEXTS = (".log", ".txt", ".out", ".err")
_KINDS = (
    "a run's name or directory, a TensorBoard event file or a folder of them, or a .jsonl, .json, "
    ".csv, .tsv, .log, .txt or .out file"
)


def locate(source: str, root: Path) -> Path:
    """What an argument of the command line means: a run's name, or any file or folder of metrics.

    A folder with metrics but without config.yaml will do: a run copied in part.

    Args:
        source: The argument.
        root: The folder of all runs.

    Raises:
        RunError: it is none of these.
    """
    if not source.strip():  # an unset variable of a script; as a path it is the folder itself
        raise RunError(f"an empty name is no run; give {_KINDS}")
    path = Path(source)
    try:
        if path.is_file():
            return path
        looks_like_a_file = bool(path.suffix) and _is_log(path)
        if looks_like_a_file and not (root / path).exists() and not path.exists():
            raise RunError(f"no metrics file {path.absolute()}; give a {path.suffix} file or a run")
        for candidate in (root / source, path):
            if (candidate / "config.yaml").is_file():
                return find_run(source, root).path
        for candidate in (root / source, path):
            if _holds_metrics(candidate):
                return candidate
        for name in _LOG_OF_FOLDER:
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
    """Read the metrics of a run, or of another framework's log.

    Args:
        source: A run directory, an event file, a folder of these, or a file of rows or lines.
        tags: Metric → the tag, column or key that holds it, over the table of known names.
        lenient: In our own files, leave broken lines out with a warning.

    Raises:
        RunError: there are no metrics, none of them is the loss, a file cannot be read, or a
            line of one of our files that is not its last is broken (if not lenient).
    """
    try:
        return _read(source, tags or {}, lenient)
    except OSError as error:
        raise RunError(
            f"cannot read {error.filename or source}: {error.strerror or error}; a log must be "
            "readable: check its permissions and the file system"
        ) from error


def _read(source: Path, tags: Mapping[str, str], lenient: bool) -> Curve:
    """Read by what the source is."""
    from slurmllm.metrics import run_curve as own

    if not source.is_file():
        if RunDir(source).metrics_files() or not source.is_dir():
            return own.read_run(source, lenient)
        from slurmllm.metrics import tensorboard_logs

        folder = RunDir(source).tensorboard
        # NeMo and Hydra leave a config.yaml beside their event files too.
        foreign = not folder.is_dir() and tensorboard_logs.event_files(source)
        if not foreign and ((source / "config.yaml").is_file() or (source / "metrics").is_dir()):
            if not folder.is_dir() or not tensorboard_logs.event_files(folder):
                return own.read_run(source, lenient)
            return tensorboard_logs.read_tensorboard(folder, own.run_name(source, False), tags)
        return tensorboard_logs.read_tensorboard(source, own.run_name(source, False), tags)
    from slurmllm.metrics.log_series import curve_of_log, plain_suffix

    name = own.run_name(source, True)
    suffix = plain_suffix(source)
    if "tfevents" in source.name:
        from slurmllm.metrics import tensorboard_logs

        return tensorboard_logs.read_tensorboard(source, source.absolute().parent.name, tags)
    if suffix in _JSON_LINES and source.suffix != ".gz" and _is_ours(source, tags):
        return own.read_run(source, lenient)
    if suffix in (*_JSON_LINES, ".json"):
        from slurmllm.metrics import tabular_logs

        reader = tabular_logs.read_json if suffix == ".json" else tabular_logs.read_json_lines
        return curve_of_log(reader(source, tags), name, tags)
    if suffix in _TABLES:
        from slurmllm.metrics import tabular_logs

        return curve_of_log(tabular_logs.read_table(source, tags), name, tags)
    if suffix in _TEXTS:
        from slurmllm.metrics import text_logs

        return curve_of_log(text_logs.read_text(source, tags), name, tags)
    raise RunError(f"{source} is of no kind that we read ({suffix or 'no suffix'}); give {_KINDS}")


def _is_log(path: Path) -> bool:
    from slurmllm.metrics.log_series import plain_suffix

    return plain_suffix(path) in (*_JSON_LINES, ".json", *_TABLES, *_TEXTS) or (
        "tfevents" in path.name
    )


def _holds_metrics(path: Path) -> bool:
    """Whether a folder is a run's that was copied in part, or TensorBoard's."""
    from slurmllm.metrics.tensorboard_logs import event_files, event_folders

    if not path.is_dir():
        return False
    return (path / "metrics").is_dir() or bool(event_files(path) or event_folders(path, limit=1))


def _is_ours(path: Path, tags: Mapping[str, str]) -> bool:
    """Whether a file's rows are ours: by its place, else by the keys of its first whole row."""
    from slurmllm.metrics.row_reader import parse_row
    from slurmllm.metrics.tags import choose

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
                chosen = choose(dict.fromkeys(row, 1), {}, path).tags
                return all(metric == tag for metric, tag in chosen.items())
    return True
