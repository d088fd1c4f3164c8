"""TensorBoard event files of any framework: records of protobufs.

An event file is a sequence of TFRecords: length, its checksum, a serialized `Event`, its checksum.
Only the lengths' checksums are verified, as a wrong length would lose all that follows.
`EventAccumulator` also migrates every event to new-style tensors, which takes 5 times as long.
"""

from __future__ import annotations

import re
import struct
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from slurmllm.errors import RunError
from slurmllm.metrics.curves import DamageWarning
from slurmllm.metrics.log_series import Log, TagSeries
from slurmllm.run.safe_files import open_regular

_MAX_DEPTH = 3
_EVENT_FILE = re.compile(r".*tfevents\.(?P<seconds>\d+)\..*")
_PIECE_BYTES = 4 << 20
_MAX_EVENT_BYTES = 16 << 20  # images and graphs: skipped without reading them into memory
_HEADER = struct.Struct("<QI")  # length and its checksum
_FRAME_BYTES = _HEADER.size + 4
_START = 1  # SessionLog.START of tensorboard/compat/proto/event.proto


@dataclass(frozen=True)
class EventFile:
    """The scalars of an event file."""

    events: int
    starts: list[int]  # indices of the events with which a process began to write
    series: dict[str, TagSeries]  # by tag
    warnings: list[str]


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
    folders: set[Path] = set()
    for depth in range(1, _MAX_DEPTH + 1):
        for path in folder.glob("*/" * depth + "*tfevents*"):
            below = path.parent
            linked = any(each.is_symlink() for each in (below, *below.parents[: depth - 1]))
            if path.is_file() and not linked:
                folders.add(below)
            if len(folders) == limit:
                return sorted(folders)
    return sorted(folders)


def read_tensorboard(source: Path, tags: Mapping[str, str]) -> Log:
    """Read an event file, or a folder of them: of a step the value of the file begun last counts.

    Raises RunError if there are no scalars, or the folders below hold several runs.
    """
    files = [source] if source.is_file() else event_files(source)
    if not files:
        # Lightning and Hugging Face write theirs to a folder of its own, below.
        folders = event_folders(source)
        if not folders:
            raise RunError(f"no metrics in {source}: no TensorBoard event files there or below")
        if len(folders) > 1:
            shown = ", ".join(str(folder.relative_to(source)) for folder in folders[:20])
            more = f" and {len(folders) - 20} more" if len(folders) > 20 else ""
            raise RunError(
                f"{source} holds the event files of several runs: {shown}{more}; name one, such as "
                f"{folders[0]}"
            )
        files = event_files(folders[0])
    series: dict[str, list[TagSeries]] = {}
    starts: list[int] = []
    warnings: list[str] = []
    before = 0  # events in the files already read
    for path in files:
        read = read_event_file(path)
        warnings += read.warnings
        starts += [before, *(before + place for place in read.starts)]
        for tag, part in _steps_from_tag(read.series, tags.get("step"), path).items():
            moved = TagSeries(part.order + before, part.steps, part.values, part.times)
            series.setdefault(tag, []).append(moved)
        before += read.events
    if not series:
        raise RunError(
            f"no scalars in {source}: {', '.join(path.name for path in files[:3])} hold none; "
            "give the folder that the training wrote its event files to"
            + "".join(f" ({warning})" for warning in warnings[:3])
        )
    joined = {
        tag: TagSeries(
            np.concatenate([part.order for part in of_tag]),
            np.concatenate([part.steps for part in of_tag]),
            np.concatenate([part.values for part in of_tag]),
            np.concatenate([part.times for part in of_tag if part.times is not None]),
        )
        for tag, of_tag in series.items()
    }
    return Log(source, "tensorboard", joined, starts, tuple(warnings))


def read_event_file(path: Path) -> EventFile:
    """Read the scalars of an event file up to the first damage."""
    # Only needed here: TensorBoard's stub of TensorFlow takes 0.15 s to import.
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]

    parse = Event.FromString
    steps, times = array("q"), array("d")  # [events]
    scalars: dict[str, tuple[array[int], array[float]]] = {}  # tag → indices of events, and values
    starts: list[int] = []
    warnings: list[str] = []
    malformed = 0
    with open_regular(path) as stream:
        try:
            for record in _records(stream):
                try:
                    event = parse(record)
                except DecodeError:
                    malformed += 1
                    continue
                values = event.summary.value
                for value in values:
                    # A zero may be the default of a value that is a tensor or an image.
                    number = value.simple_value
                    if not number and not value.HasField("simple_value"):
                        number = _tensor_scalar(value)
                        if number is None:
                            continue
                    tag = value.tag
                    if tag not in scalars:
                        scalars[tag] = (array("q"), array("d"))
                    indices, numbers = scalars[tag]
                    indices.append(len(steps))
                    numbers.append(number)
                if not values and event.session_log.status == _START:
                    starts.append(len(steps))
                steps.append(event.step)
                times.append(event.wall_time)
        except (EOFError, ValueError) as error:
            text = f"{path}: {error}; read as far as that"
            warnings.append(text if isinstance(error, EOFError) else DamageWarning(text))
    if malformed:
        text = f"{path}: {malformed} records are not TensorBoard events; skipped them"
        warnings.append(DamageWarning(text))
    all_steps, all_times = np.array(steps, dtype=np.int64), np.array(times)
    series = {}
    for tag, (indices, numbers) in scalars.items():
        order = np.array(indices, dtype=np.int64)
        series[tag] = TagSeries(order, all_steps[order], np.array(numbers), all_times[order])
    return EventFile(len(steps), starts, series, warnings)


def _records(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the serialized events of a file, in order, without those too large for scalars.

    Raises EOFError if the last record is cut, ValueError if the length of one is damaged.
    """
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import (  # type: ignore[import-untyped]
        masked_crc32c,
    )

    unpack, header_bytes = _HEADER.unpack_from, _HEADER.size
    text, position = b"", 0  # bytes not read yet, and where in the file they begin
    checksums: dict[int, int] = {}  # length → its checksum: few lengths occur, the CRC is slow
    file_bytes = stream.seek(0, 2)
    stream.seek(0)
    while piece := stream.read(_PIECE_BYTES):
        text += piece
        begin, end = 0, len(text)
        while begin + _FRAME_BYTES <= end:
            size, checksum = unpack(text, begin)
            if checksums.get(size) != checksum:
                if masked_crc32c(text[begin : begin + 8]) != checksum:
                    raise ValueError(f"the record at byte {position + begin} is damaged")
                checksums[size] = checksum
            following = begin + size + _FRAME_BYTES
            if following > end:
                break
            yield text[begin + header_bytes : following - 4]
            begin = following
        text, position = text[begin:], position + begin
        size = unpack(text)[0] if len(text) >= header_bytes else 0
        if size > _MAX_EVENT_BYTES and position + size + _FRAME_BYTES <= file_bytes:
            position = stream.seek(position + size + _FRAME_BYTES)
            text = b""
    if text:
        raise EOFError(f"the last record, at byte {position}, is cut")


def _tensor_scalar(value: Any) -> float | None:
    """Return the number in the tensor of a `Summary.Value`; None if it is not a scalar."""
    from tensorboard.util.tensor_util import make_ndarray  # type: ignore[import-untyped]

    # One value may stand for a tensor of any shape: 60 bytes of a file for terabytes of memory.
    dims = value.tensor.tensor_shape.dim
    if value.metadata.plugin_data.plugin_name not in ("", "scalars") or any(
        dim.size != 1 for dim in dims
    ):
        return None
    try:
        tensor = make_ndarray(value.tensor)
    except (TypeError, ValueError):  # an image, or a type that TensorBoard does not read either
        return None
    return float(tensor.item()) if tensor.size == 1 and tensor.dtype.kind in "fiu" else None


def _steps_from_tag(
    series: dict[str, TagSeries], key: str | None, path: Path
) -> dict[str, TagSeries]:
    """Replace the events' steps by the values of the tag `key`, if the user named one."""
    if key is None or key not in series:
        return series
    values = series[key].values  # of an event step that occurs several times the last value counts
    fractional = values[np.isfinite(values) & (values != np.floor(values))]
    if fractional.size:
        raise RunError(
            f"{path}: {key} is {fractional[0]:g}, not a whole number; name another tag with "
            "--tag step=TAG"
        )
    by_step = dict(zip(series[key].steps.tolist(), series[key].values.tolist(), strict=True))
    renumbered = {}
    for tag, old in series.items():
        steps = np.array([by_step.get(step, np.nan) for step in old.steps.tolist()])
        has_step = np.isfinite(steps)
        times = None if old.times is None else old.times[has_step]
        numbers = steps[has_step].astype(np.int64)
        renumbered[tag] = TagSeries(old.order[has_step], numbers, old.values[has_step], times)
    return renumbered
