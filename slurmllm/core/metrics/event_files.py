"""TensorBoard event files of any framework.

An event file is a sequence of TFRecords: length, its checksum, a serialized `Event`, its checksum.
Only the lengths' checksums are verified, as a wrong length would lose all that follows.
`EventAccumulator` also migrates every event to new-style tensors, which takes 5 times as long.
"""

from __future__ import annotations

import re
import struct
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from slurmllm.core.errors import RunError
from slurmllm.core.format import format_names
from slurmllm.core.metrics.curves import DamageWarning, SourceKind
from slurmllm.core.metrics.log_series import Log, LogReader, Rows, SeriesByTag
from slurmllm.core.metrics.tags import Tags

_MAX_DEPTH = 3
_EVENT_FILE = re.compile(r".*tfevents\.(?P<seconds>\d+)\..*")
_MAX_EVENT_BYTES = 16 << 20  # images and graphs: skipped without reading them into memory
_HEADER = struct.Struct("<QI")  # length and its checksum
_FRAME_BYTES = _HEADER.size + 4
_START = 1  # SessionLog.START of tensorboard/compat/proto/event.proto


def is_event_file(path: Path) -> bool:
    return "tfevents" in path.name


def event_files(folder: Path) -> list[Path]:
    """Return the event files of a folder, oldest first by the time in their names."""

    def begun(path: Path) -> tuple[int, str]:
        match = _EVENT_FILE.fullmatch(path.name)
        return (int(match["seconds"]) if match else 0, path.name)

    return sorted(
        (path for path in folder.iterdir() if is_event_file(path) and path.is_file()), key=begun
    )


def event_folders(folder: Path, limit: int = 50) -> list[Path]:
    """Return at most `limit` folders below one, a few levels deep, that hold event files."""
    folders = set()
    for depth in range(1, _MAX_DEPTH + 1):
        for path in folder.glob("*/" * depth + "*tfevents*"):
            below = path.parent
            if path.is_file() and not any(
                each.is_symlink() for each in (below, *below.parents[: depth - 1])
            ):
                folders.add(below)
            if len(folders) == limit:
                return sorted(folders)
    return sorted(folders)


def training_files(source: Path) -> list[Path]:
    """Return the event files of one training: a file, or those of a folder or of one below it.

    Raises RunError if there are none, or those of several runs.
    """
    if source.is_file():
        return [source]
    # Lightning and Hugging Face write theirs to a folder of its own, below.
    files = event_files(source)
    if files:
        return files
    folders = event_folders(source)
    if not folders:
        raise RunError(f"no metrics in {source}: no TensorBoard event files there or below")
    if len(folders) > 1:
        listed = format_names([str(folder.relative_to(source)) for folder in folders], 20)
        raise RunError(
            f"{source} holds the event files of several runs: {listed}; name one, such as "
            f"{folders[0]}"
        )
    return event_files(folders[0])


class EventReader(LogReader):
    """Reads the scalars of event files one after another, each up to its first damage."""

    kind: SourceKind = "tensorboard"

    def __init__(self, path: Path) -> None:
        # Only needed here: TensorBoard's stub of TensorFlow takes 0.15 s to import.
        from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import (
            masked_crc32c,
        )

        super().__init__()
        self.starts: list[int] = []  # indices of the events with which a process began to write
        self._parse = Event.FromString
        self._decode_error = DecodeError
        self._checksum = masked_crc32c
        # [events]
        self._steps = array("q")
        self._times = array("d")
        self._checksums: dict[int, int] = {}  # length → its checksum: few lengths occur
        self.begin_file(path)

    def begin_file(self, path: Path) -> None:
        """Read another file, whose values win over those of the files before."""
        self._path = path
        self.starts.append(len(self._steps))
        # bytes not read yet, and where in the file they begin
        self._rest = b""
        self._offset = 0
        self._skip = 0  # bytes of a record that is too large for scalars
        self._malformed = 0
        self._is_damaged = False

    def feed(self, data: bytes) -> None:
        skipped = min(self._skip, len(data))
        self._skip -= skipped
        self._offset += skipped
        if self._is_damaged or skipped == len(data):
            return
        self._rest += data[skipped:]
        for record in self._records():
            self._read_event(record)

    def _records(self) -> Iterator[bytes]:
        """Yield the serialized events that are complete, without those too large for scalars."""
        content = self._rest
        begin = 0
        end = len(self._rest)
        while begin + _FRAME_BYTES <= end:
            size, checksum = _HEADER.unpack_from(content, begin)
            if self._checksums.get(size) != checksum:
                if self._checksum(content[begin : begin + 8]) != checksum:
                    self.warnings.append(
                        DamageWarning(
                            f"{self._path}: the record at byte {self._offset + begin} is damaged; "
                            "read as far as that"
                        )
                    )
                    self._is_damaged = True
                    return
                self._checksums[size] = checksum
            following = begin + size + _FRAME_BYTES
            if following > end:
                if size > _MAX_EVENT_BYTES:
                    self._skip = following - end
                    begin = end
                break
            yield content[begin + _HEADER.size : following - 4]
            begin = following
        self._rest = content[begin:]
        self._offset += begin

    def _read_event(self, record: bytes) -> None:
        try:
            event = self._parse(record)
        except self._decode_error:
            self._malformed += 1
            return
        scalars = []
        values = event.summary.value
        for value in values:
            # A zero may be the default of a value that is a tensor or an image.
            number = value.simple_value
            if not number and not value.HasField("simple_value"):
                number = _tensor_scalar(value)
            if number is not None:
                scalars.append((value.tag, number))
        if not values and event.session_log.status == _START:
            self.starts.append(len(self._steps))
        self.rows.add(scalars)
        self._steps.append(event.step)
        self._times.append(event.wall_time)

    def flush(self, last: bool = False) -> None:
        if last and (self._skip or self._rest) and not self._is_damaged:
            self.warnings.append(
                f"{self._path}: the last record, at byte {self._offset}, is cut; read as far as "
                "that"
            )
        if last and self._malformed:
            message = f"{self._malformed} records are not TensorBoard events; skipped them"
            self.warnings.append(DamageWarning(f"{self._path}: {message}"))

    def take(self) -> Rows:
        self.rows.set_column("step", self._steps)
        self.rows.set_column("time", self._times)
        self._steps = array("q")
        self._times = array("d")
        return self.rows.take()

    def log(self, path: Path, tags: Tags) -> Log:
        series = _steps_from_tag(
            self.rows.series(np.array(self._steps, np.int64), np.array(self._times)),
            tags.get("step"),
            path,
        )
        if not series:
            raise RunError(
                f"no scalars in {path}: {self._path.name} holds none; give the folder that the "
                "training wrote its event files to"
                + "".join(f" ({warning})" for warning in self.warnings[:3])
            )
        return Log(path, self.kind, series, self.starts, tuple(self.warnings))


def _tensor_scalar(value: Any) -> float | None:
    """Return the number in the tensor of a `Summary.Value`; None if it is not a scalar."""
    from tensorboard.util.tensor_util import make_ndarray

    # One value may stand for a tensor of any shape: 60 bytes of a file for terabytes of memory.
    if any(dim.size != 1 for dim in value.tensor.tensor_shape.dim):
        return None
    if value.metadata.plugin_data.plugin_name not in ("", "scalars"):
        return None
    try:
        tensor = make_ndarray(value.tensor)
    except (TypeError, ValueError):  # an image, or a type that TensorBoard does not read either
        return None
    return float(tensor.item()) if tensor.size == 1 and tensor.dtype.kind in "fiu" else None


def _steps_from_tag(series: SeriesByTag, key: str | None, path: Path) -> SeriesByTag:
    """Replace the events' steps by the values of the tag `key`, if the user named one."""
    if key is None or key not in series:
        return series
    numbers = series[key].values
    fractional = numbers[np.isfinite(numbers) & (numbers != np.floor(numbers))]
    if fractional.size:
        raise RunError(
            f"{path}: {key} is {fractional[0]:g}, not a whole number; name another tag with "
            "--tag step=TAG"
        )
    # Of an event step that occurs several times the last value counts.
    by_step = dict(zip(series[key].steps.tolist(), numbers.tolist(), strict=True))
    renumbered = {}
    for tag, old in series.items():
        steps = np.array([by_step.get(step, np.nan) for step in old.steps.tolist()])
        rows = np.isfinite(steps)
        renumbered[tag] = replace(old.take(rows), steps=steps[rows].astype(np.int64))
    return renumbered
