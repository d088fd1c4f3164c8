"""Files of trackers: W&B's offline run-ID.wandb, MLflow's file store, TensorBoard's CSV tables.

A .wandb file is a log in LevelDB's format (leveldb doc/log_format.md, with a header of 7 bytes):
blocks of 32 KiB with records, each a serialized `Record` of wandb/proto/wandb_internal.proto. Only
its history is read, without the wandb package.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from slurmllm.errors import RunError
from slurmllm.metrics.log_series import Log, RowCollector, TagSeries
from slurmllm.metrics.text_logs import json_numbers, read_table

_FILE_HEADER = struct.Struct("<4sHB")  # ":W&B", magic, version
_HEADER = struct.Struct("<IHB")  # checksum, length, type
_BLOCK_BYTES = 1 << 15
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
# Fields: Record.history; HistoryRecord.item, .step; HistoryItem.key, .nested_key, .value_json
_HISTORY, _ITEM, _STEP, _KEY, _NESTED_KEY, _VALUE_JSON = 2, 1, 2, 1, 2, 16
# TensorBoard's "Download as CSV" (one file per tag), OLMo-core's metric_saver.py (one per step)
_TAG_CSV = re.compile(r".*-tag-(?P<tag>.+)\.csv")
_STEP_JSON = re.compile(r"metrics_step(?P<step>\d+)\.json")


def read_wandb(path: Path, tags: Mapping[str, str]) -> Log:
    """Read a W&B offline run file.

    Raises:
        RunError: it is not such a file, or holds no history.
        OSError: the file cannot be read.
    """
    content, rows, warnings = path.read_bytes(), RowCollector(), list[str]()
    if content[:4] != b":W&B":
        raise RunError(
            f"{path} is not a W&B run file: it begins with {content[:4]!r} instead of b':W&B'; "
            "give the run-ID.wandb of an offline-run folder"
        )
    try:
        for record in _wandb_records(content):
            for field, history in _protobuf_fields(record):
                if field == _HISTORY and isinstance(history, bytes):
                    rows.add(_history_row(history).items())
    except (ValueError, IndexError, struct.error) as error:
        warnings.append(f"{path}: {error}; read as far as that")
    return rows.log(path, "jsonl", tags, warnings)


def _wandb_records(content: bytes) -> Iterator[bytes]:
    record, place = b"", _FILE_HEADER.size
    while place + _HEADER.size <= len(content):
        rest_of_block = _BLOCK_BYTES - place % _BLOCK_BYTES
        if rest_of_block < _HEADER.size:  # too short for a header: zeros
            place += rest_of_block
            continue
        checksum, size, kind = _HEADER.unpack_from(content, place)
        text = content[place + _HEADER.size : place + _HEADER.size + size]
        if len(text) < size:
            raise ValueError(f"the record at byte {place} is cut")
        if zlib.crc32(text, zlib.crc32(bytes([kind]))) != checksum:
            raise ValueError(f"the record at byte {place} is damaged")
        record = text if kind in (_FULL, _FIRST) else record + text
        if kind in (_FULL, _LAST):
            yield record
        place += _HEADER.size + size


def _protobuf_fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and value of a message's fields: varints as integers, the others as bytes."""
    place = 0

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = message[place]
            place += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while place < len(message):
        tag = varint()
        if tag & 7 == 0:
            yield tag >> 3, varint()
            continue
        size = {1: 8, 5: 4}.get(tag & 7)
        size = varint() if size is None else size
        yield tag >> 3, message[place : place + size]
        place += size


def _history_row(history: bytes) -> dict[str, float]:
    row: dict[str, object] = {}
    for field, value in _protobuf_fields(history):
        if field == _STEP and isinstance(value, bytes):
            row["_step"] = dict(_protobuf_fields(value)).get(1, 0)
        elif field == _ITEM and isinstance(value, bytes):
            item: dict[int, bytes] = {}
            nested: list[str] = []
            for one, text in _protobuf_fields(value):
                if isinstance(text, bytes):
                    item[one] = text
                    nested += [text.decode("utf-8", "replace")] if one == _NESTED_KEY else []
            name = item[_KEY].decode("utf-8", "replace") if _KEY in item else ".".join(nested)
            row[name] = json.loads(item.get(_VALUE_JSON, b"null"))
    return dict(json_numbers(row))


def mlflow_runs(folder: Path) -> list[Path]:
    """Returns the runs of an MLflow file store: the folder itself, or those below it."""
    if (folder / "meta.yaml").is_file() and (folder / "metrics").is_dir():
        return [folder]
    found = [*folder.glob("*/meta.yaml"), *folder.glob("*/*/meta.yaml")]
    return sorted(path.parent for path in found if (path.parent / "metrics").is_dir())


def read_mlflow(run: Path, tags: Mapping[str, str]) -> Log:
    """Read a run of an MLflow file store: metrics/NAME holds lines of `timestamp value step`.

    Raises:
        RunError: it has no metrics.
        OSError: a file cannot be read.
    """
    rows, warnings = RowCollector(), list[str]()
    for path in sorted(path for path in (run / "metrics").rglob("*") if path.is_file()):
        name = path.relative_to(run / "metrics").as_posix()
        broken: list[int] = []
        for number, line in enumerate(path.read_text("utf-8", "replace").splitlines(), start=1):
            try:
                moment, value, step = line.split()[:3]
                numbers = {"step": float(step), name: float(value), "time": float(moment) / 1e3}
            except ValueError:
                broken.append(number)
                continue
            rows.add(numbers.items())
        if broken:
            warnings.append(
                f"{path}:{broken[0]}: not `timestamp value step`; skipped {len(broken)} lines"
            )
    return rows.log(run, "jsonl", tags, warnings)


def is_tag_table(path: Path) -> bool:
    """Whether a file is TensorBoard's CSV of one tag: `Wall time,Step,Value`."""
    with path.open("rb") as stream:
        return stream.readline(100).strip().lower() == b"wall time,step,value"


def split_log_files(folder: Path) -> list[Path]:
    """Returns a folder's files that hold one tag (TensorBoard's CSV) or one step (OLMo-core)."""
    return sorted(
        path for path in folder.iterdir()
        if _TAG_CSV.fullmatch(path.name) or _STEP_JSON.fullmatch(path.name)
    )  # fmt: skip


def read_split_log(path: Path, tags: Mapping[str, str]) -> Log:
    """Read such a file, or a folder of them.

    Raises:
        RunError: a file has no rows.
        OSError: a file cannot be read.
    """
    files = split_log_files(path) if path.is_dir() else [path]
    rows, logs = RowCollector(), list[Log]()
    for file in files:
        if found := _STEP_JSON.fullmatch(file.name):
            document = json.loads(file.read_text("utf-8"))
            rows.add([("step", float(found["step"])), *json_numbers(document)])
        else:
            logs.append(read_table(file, tags))
    if len(rows):
        return rows.log(path, "jsonl", tags)
    series: dict[str, TagSeries] = {}
    for file, log in zip(files, logs, strict=True):
        name = file.name if "Value" not in tags.values() else ""
        found = _TAG_CSV.fullmatch(name)
        # TensorBoard replaces the slash of train/loss.
        tag = re.sub("^(train|eval|val)_", r"\1/", found["tag"]) if found else "Value"
        values, times = log.series["Value"], log.series.get("Wall time")
        series[tag] = replace(values, times=None if times is None else times.values)
    warnings = tuple(warning for log in logs for warning in log.warnings)
    return Log(path, "csv", series, warnings=warnings)
