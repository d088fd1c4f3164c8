"""A run's own metrics, or a single file of them, as a curve; a run writes one file an attempt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from slurmllm.analysis.curves import Curve
from slurmllm.analysis.reading.attempt import read_attempts
from slurmllm.analysis.reading.rows import unreadable
from slurmllm.analysis.reading.settings import read_nodes, read_settings
from slurmllm.analysis.reading.table import curve_of
from slurmllm.errors import RunError, StorageError
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
        raise unreadable(source, error) from error
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
    curve = curve_of(
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
