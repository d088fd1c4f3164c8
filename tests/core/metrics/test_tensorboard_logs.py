"""TensorBoard event files: the same scalars as `EventAccumulator`, damage, restarts, folders."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from amounts import amount
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util.tensor_util import make_tensor_proto
from training_rows import make_rows, write_rows

from slurmllm.core.errors import RunError
from slurmllm.core.metrics import event_files, log_files
from slurmllm.core.metrics.log_files import read_events
from slurmllm.core.metrics.source import read_curve

tags = st.sampled_from(["loss", "lr", "norm", "train/loss", "ü", "a_rather_long_tag/of_something"])
float32s = st.floats(width=32)


def write_events(path: Path, events: list[Event]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as stream:
        writer = RecordWriter(stream)
        for event in events:
            writer.write(event.SerializeToString())
    return path


def scalar(tag: str, value: float) -> Summary.Value:
    return Summary.Value(tag=tag, simple_value=value)


def event(step: int, *values: Summary.Value, wall_time: float = 1.7e9) -> Event:
    return Event(wall_time=wall_time + step, step=step, summary=Summary(value=values))


def loss_events(first: int, last: int, value: float = 1.0) -> list[Event]:
    return [event(step, scalar("train/loss", value + step)) for step in range(first, last + 1)]


def assert_equal_to_tensorboard(path: Path) -> None:
    accumulator = EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.purge_orphaned_data = False
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]
    if not tags:
        with pytest.raises(RunError, match="no scalars"):
            read_events(path, {})
        return
    read = read_events(path, {})
    assert set(read.series) == set(tags)
    for tag, series in read.series.items():
        theirs = accumulator.Scalars(tag)
        np.testing.assert_array_equal(series.steps, [value.step for value in theirs])
        np.testing.assert_array_equal(series.values, [value.value for value in theirs])
        np.testing.assert_array_equal(series.times, [value.wall_time for value in theirs])


@settings(max_examples=amount(15, of=60))
@given(
    events=st.lists(
        st.tuples(
            st.integers(0, 2**40) | st.integers(0, 300),
            st.floats(0, 2e9) | st.just(1.7e9),
            st.lists(st.tuples(tags, float32s), max_size=3),
            st.sampled_from(["", "histogram", "text", "start"]),
        ),
        max_size=40,
    ),
    cut=st.integers(0, 50),
)
def test_scalars_equal_tensorboards(events: list[tuple[Any, ...]], cut: int) -> None:
    written = [Event(wall_time=1.0, file_version="brain.Event:2")]
    for step, wall_time, values, besides in events:
        summary = Summary(value=[scalar(tag, value) for tag, value in values])
        if besides == "text":
            summary.value.add(tag="note", tensor=make_tensor_proto("some text"))
        if besides == "histogram":
            summary.value.add(tag="weights").histo.bucket.extend([1.0, 2.0, 3.0])
        written.append(Event(wall_time=wall_time, step=step, summary=summary))
        if besides == "start":
            start = SessionLog(status=SessionLog.START)
            written.append(Event(wall_time=wall_time, step=step, session_log=start))
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_files, "_CHUNK_BYTES", 300)
        path = write_events(Path(folder) / "events.out.tfevents.1.h", written)
        path.write_bytes(path.read_bytes()[: path.stat().st_size - cut])
        assert_equal_to_tensorboard(path)


@pytest.mark.filterwarnings("ignore:Setting the dtype")  # TensorBoard's, of NumPy 2.5
@pytest.mark.parametrize(
    ("dtype", "field", "value", "stored"),
    [
        (np.float32, "float_val", 2.5, 2.5),
        (np.float64, "double_val", 2.5, 2.5),
        (np.int32, "int_val", -3, -3),
        (np.int64, "int64_val", 2**40, 2**40),
        (np.float16, "half_val", 2.5, int(np.float16(2.5).view(np.uint16))),
    ],
)
def test_tensor_scalars(tmp_path: Path, dtype: Any, field: str, value: float, stored: Any) -> None:
    proto = make_tensor_proto(value, dtype)
    one_by_one = TensorProto(dtype=proto.dtype, **{field: [stored]})
    content = TensorProto(dtype=proto.dtype, tensor_content=dtype(value).tobytes())
    vector = make_tensor_proto(np.ones(3, dtype=dtype))
    events = [
        event(step, Summary.Value(tag="train/loss", tensor=tensor))
        for step, tensor in enumerate([proto, one_by_one, content, vector, proto])
    ]
    path = write_events(tmp_path / "x.tfevents.1.h", events)
    series = read_events(path, {}).series["train/loss"]
    assert series.steps.tolist() == [0, 1, 2, 4]
    assert series.values.tolist() == [value] * 4


def test_damage_is_named_and_what_is_before_it_read(tmp_path: Path) -> None:
    path = write_events(tmp_path / "events.out.tfevents.1.h", loss_events(1, 100))
    text = bytearray(path.read_bytes())
    size = len(text)
    path.write_bytes(text[:-5])
    curve = read_curve(path)
    assert curve.steps[-1] == 99
    assert "the last record, at byte" in curve.warnings[0]
    place = next(i for i in range(size // 2, size) if text[i : i + 8] == text[:8])
    text[place + 3] ^= 0x40
    path.write_bytes(text)
    curve = read_curve(path)
    assert 40 < curve.steps[-1] < 60
    assert curve.warnings == (
        f"{path}: the record at byte {place} is damaged; read as far as that",
    )
    path.write_bytes(b"")
    with pytest.raises(RunError, match="no scalars in"):
        read_curve(path)


def test_restarts_in_one_folder_are_one_curve(tmp_path: Path) -> None:
    start = Event(step=41, session_log=SessionLog(status=SessionLog.START))
    write_events(tmp_path / "events.out.tfevents.100.h.1.0", loss_events(1, 50))
    write_events(tmp_path / "events.out.tfevents.99999.h.2.0", [start, *loss_events(41, 80, 2.0)])
    write_events(tmp_path / "events.out.tfevents.100000.h.3.0", loss_events(71, 90, 2.0))
    curve = read_curve(tmp_path)
    assert curve.steps.tolist() == list(range(1, 91))
    assert curve.columns["loss"].tolist() == [s + (1.0 if s < 41 else 2.0) for s in range(1, 91)]
    assert curve.restarts.tolist() == [41, 71]
    assert (curve.overlap_rows, curve.overlap_identical) == (20, False)
    assert curve.overlap_max_rel_diff == pytest.approx(1 / 43)
    write_events(tmp_path / "logs" / "version_0" / "x.tfevents.1.h", loss_events(1, 3))
    assert read_curve(tmp_path / "logs").steps.tolist() == [1, 2, 3]
    write_events(tmp_path / "logs" / "version_1" / "x.tfevents.1.h", loss_events(1, 3))
    with pytest.raises(RunError, match=r"several runs: version_0, version_1; name one, such as"):
        read_curve(tmp_path / "logs")


def test_events_too_large_and_records_that_are_no_events_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_files, "_CHUNK_BYTES", 1000)
    monkeypatch.setattr(event_files, "_MAX_EVENT_BYTES", 3000)
    image = event(5, Summary.Value(tag="i", image=Summary.Image(encoded_image_string=b"x" * 9000)))
    events = [*loss_events(1, 9), image, *loss_events(10, 20)]
    curve = read_curve(write_events(tmp_path / "x.tfevents.1.h", events))
    assert curve.steps.tolist() == list(range(1, 21))
    assert not curve.warnings
    path = tmp_path / "x.tfevents.1.h"
    with path.open("wb") as stream:
        writer = RecordWriter(stream)
        for record in loss_events(1, 3):
            writer.write(record.SerializeToString())
            writer.write(b"\xff" * 9)
    curve = read_curve(path)
    assert curve.steps.tolist() == [1, 2, 3]
    assert curve.warnings == (f"{path}: 3 records are not TensorBoard events; skipped them",)


def test_a_tag_as_the_step_and_metrics_before_events(tmp_path: Path) -> None:
    events = [
        event(i, scalar("my/step", 10.0 * i), scalar("my/loss", 5.0 - i)) for i in range(1, 4)
    ]
    path = write_events(tmp_path / "x.tfevents.1.h", events)
    curve = read_curve(path, {"step": "my/step", "loss": "my/loss"})
    assert curve.steps.tolist() == [10, 20, 30]
    assert curve.columns["loss"].tolist() == [4.0, 3.0, 2.0]
    with pytest.raises(RunError, match=r"no loss in .*; there are my/loss, my/step; .*--tag loss="):
        read_curve(path)
    run = tmp_path / "r"
    write_events(run / "tensorboard" / "x.tfevents.1.h", loss_events(1, 9))
    (run / "config.yaml").write_text("name: r\n")
    of_events = read_curve(run)
    assert (of_events.name, of_events.kind, len(of_events.steps)) == ("r", "tensorboard", 9)
    write_rows(run / "metrics" / "attempt_000.jsonl", make_rows(1, 5))
    assert (read_curve(run).kind, len(read_curve(run).steps)) == ("run", 5)
