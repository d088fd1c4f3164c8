"""TensorBoard event files of any framework as a log."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from slurmllm.errors import RunError
from slurmllm.metrics.curves import Curve
from slurmllm.metrics.event_files import EventFile, read_event_file
from slurmllm.metrics.log_series import Log, TagSeries, curve_of_log

_LEVELS = 3
_EVENT_FILE = re.compile(r".*tfevents\.(?P<seconds>\d+)\..*")


def is_event_file(path: Path) -> bool:
    """Whether a file is TensorBoard's, by its name."""
    return "tfevents" in path.name


def event_files(folder: Path) -> list[Path]:
    """The event files of a folder, in the order in which they were begun."""
    found = [path for path in folder.iterdir() if is_event_file(path) and path.is_file()]
    return sorted(found, key=_begun)


def event_folders(folder: Path, most: int = 50) -> list[Path]:
    """The folders below one, a few levels deep, that hold event files, by name; `most` of them."""
    found: list[Path] = []
    level = [folder]
    for _ in range(_LEVELS):
        level = sorted(entry for above in level for entry in above.iterdir() if _is_folder(entry))
        for below in level:
            if len(found) == most:
                return sorted(found)
            if event_files(below):
                found.append(below)
    return sorted(found)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and os.access(path, os.R_OK | os.X_OK) and not path.is_symlink()


def read_tensorboard(source: Path, name: str, tags: Mapping[str, str]) -> Curve:
    """Read an event file, or a folder of them: what a training wrote, restarts included.

    Of a step that several files hold the one that was begun last stands.

    Args:
        source: The file or the folder.
        name: What to call the curve.
        tags: Metric → tag, over the table.

    Raises:
        RunError: there are no scalars, none is the loss, or the folders below hold several runs.
        OSError: a file cannot be read.
    """
    files = [source] if source.is_file() else event_files(source) or _only_folder(source)
    series: dict[str, list[TagSeries]] = {}
    starts: list[int] = []
    warnings: list[str] = []
    before = 0
    for path in files:
        read = read_event_file(path)
        warnings += read.warnings
        starts += [before, *(before + place for place in read.starts)]
        for tag, of_file in _by_our_step(read, tags).items():
            series.setdefault(tag, []).append(_moved(of_file, before))
        before += read.events
    if not series:
        raise RunError(
            f"no scalars in {source}: {', '.join(path.name for path in files[:3])} hold none; "
            "give the folder that the training wrote its event files to"
            + "".join(f" ({warning})" for warning in warnings[:3])
        )
    joined = {tag: _joined(of_tag) for tag, of_tag in series.items()}
    return curve_of_log(Log(source, "tensorboard", joined, starts, tuple(warnings)), name, tags)


def _begun(path: Path) -> tuple[int, str]:
    found = _EVENT_FILE.fullmatch(path.name)
    return (int(found["seconds"]) if found else 0, path.name)


def _only_folder(source: Path) -> list[Path]:
    """The event files of the one folder below that holds any.

    Lightning and Hugging Face put theirs into a folder of their own.
    """
    folders = event_folders(source)
    if len(folders) == 1:
        return event_files(folders[0])
    if not folders:
        raise RunError(f"no metrics in {source}: no TensorBoard event files there or below")
    shown = ", ".join(str(folder.relative_to(source)) for folder in folders[:20])
    more = f" and {len(folders) - 20} more" if len(folders) > 20 else ""
    raise RunError(
        f"{source} holds the event files of several runs: {shown}{more}; name one, such as "
        f"{folders[0]}"
    )


def _by_our_step(read: EventFile, tags: Mapping[str, str]) -> dict[str, TagSeries]:
    """The series of a file; by the values of another tag where that was said to be the step."""
    key = tags.get("step")
    if key is None or key not in read.series:
        return read.series
    whole = np.isfinite(read.series[key].values)
    by_event, told = read.series[key].steps[whole], read.series[key].values[whole]
    if not len(told):
        return {}
    last = len(by_event) - 1 - np.unique(by_event[::-1], return_index=True)[1]
    at, steps = by_event[last], told[last].astype(np.int64)
    found = {}
    for tag, series in read.series.items():
        where = np.minimum(np.searchsorted(at, series.steps), len(at) - 1)
        same = at[where] == series.steps
        times = None if series.times is None else series.times[same]
        found[tag] = TagSeries(series.order[same], steps[where[same]], series.values[same], times)
    return found


def _moved(series: TagSeries, before: int) -> TagSeries:
    return TagSeries(series.order + before, series.steps, series.values, series.times)


def _joined(parts: list[TagSeries]) -> TagSeries:
    return TagSeries(
        np.concatenate([part.order for part in parts]),
        np.concatenate([part.steps for part in parts]),
        np.concatenate([part.values for part in parts]),
        np.concatenate([part.times for part in parts if part.times is not None]),
    )
