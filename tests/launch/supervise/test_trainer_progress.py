"""The progress of other trainers: rows equal to what `compare` reads of the whole log."""

import fcntl
import json
import os
import random
import re
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from core.metrics.test_formats import LINES
from core.metrics.test_tensorboard_logs import event, scalar, write_events
from training_rows import Row

from slurmllm.core.config.command import CommandConfig
from slurmllm.core.config.resolve import resolve
from slurmllm.core.metrics import following
from slurmllm.core.metrics.curves import Curve
from slurmllm.core.metrics.row_reader import read_events, read_rows
from slurmllm.core.metrics.source import read_curve
from slurmllm.core.run.rundir import RunDir
from slurmllm.launch.supervise.progress import TrainerProgress, check_progress
from slurmllm.launch.supervise.trainer import TrainerObserver

LOGS = Path(__file__).parents[2] / "core" / "metrics" / "formats"
CASES = [(case["format"], case["text"], case["first"], case["values"]) for case in LINES]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "runs" / "theirs")
    for path in (run.metrics(0), run.events(0)):
        path.parent.mkdir(parents=True)
    run.config.write_text("command: {run: theirs}\n")
    return run


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_POLL_S", "_REREAD_S"):
        monkeypatch.setattr(following, name, 0.0)


def pieces(content: bytes, seed: int) -> Iterator[bytes]:
    """Cut anywhere: within lines, characters and `\\r\\n`."""
    rng, begin = random.Random(seed), 0
    while begin < len(content):
        size = rng.choice([1, 2, 7, 50, 300, 2000])
        yield content[begin : begin + size]
        begin += size


def feed(follower: TrainerProgress, *texts: str, last: bool = False) -> None:
    for text in texts:
        follower.feed(text.encode())
        follower.update(last=last)


def rows_of(run: RunDir, attempt: int = 0) -> list[Row]:
    return [row for _, row in read_rows(run.metrics(attempt))]


def replay(run: RunDir, content: bytes, seed: int = 0, progress: str | None = None) -> Curve:
    follower = TrainerProgress(run, 0, progress)
    for piece in pieces(content, seed):
        follower.feed(piece)
        follower.update()
    follower.update(last=True)
    assert follower.missing() == "" or " counts " in follower.missing()
    return read_curve(run.path)


def assert_same(ours: Curve, theirs: Curve) -> None:
    """The rows of a followed run are those of its log, with steps from 1."""
    rule = theirs.convention
    shift = int(rule is not None and (rule.steps_from, rule.counts) == (0, "steps"))
    np.testing.assert_array_equal(ours.steps, theirs.steps + shift)
    ours_too = {"time", "step_time_s", "samples"}
    assert set(theirs.columns) - ours_too == set(ours.columns) - ours_too
    for metric in set(theirs.columns) - {"time", "samples"}:
        steps, values = theirs.series(metric)
        measured = np.isin(ours.series(metric)[0], steps + shift)
        for a, b in zip(ours.series(metric), (steps + shift, values), strict=True):
            np.testing.assert_array_equal(a[measured], b, metric)
    times = ours.series("time")[1]
    assert np.all(np.diff(times) >= 0)


@pytest.mark.parametrize(("name", "line", "first", "_expected"), CASES)
def test_rows_of_a_growing_output_are_those_of_the_log(
    name: str, line: str, first: int, _expected: object, run: RunDir, tmp_path: Path
) -> None:
    rng = random.Random(name)
    text = "loading … 模型 loss of nothing\n"
    for step in range(first, first + 15):
        # another loss in each
        text += re.sub(r"(?<=\d\.\d)(?=\d)", str(step % 10), line.format(step=step)) + rng.choice(
            ["\n", "\r\n", "\n\n", "\n  50%|█\r 60%|██\n"]
        )
    path = tmp_path / "log.out"
    path.write_bytes(text.encode())
    theirs = read_curve(path)
    for attempt, progress in enumerate((None, name)):
        for file in (run.metrics(0), run.events(0)):
            file.unlink(missing_ok=True)
        assert_same(replay(run, text.encode(), attempt, progress), theirs)


@pytest.mark.parametrize("name", ["hugging_face.log", "torchtune.txt"])
@pytest.mark.parametrize("seed", range(2))
def test_rows_of_real_logs(name: str, seed: int, run: RunDir) -> None:
    path = LOGS / name
    assert_same(replay(run, path.read_bytes(), seed), read_curve(path))


@pytest.mark.parametrize(
    "name", ["lightning.csv", "litgpt.csv", "trainer_state.json", "history.jsonl", "log.txt"]
)
def test_rows_of_a_growing_file_are_the_logs(name: str, run: RunDir, tmp_path: Path) -> None:
    content = (
        (LOGS / name.replace("log.txt", "torchtune.txt")).read_bytes() if name[0] != "h" else b""
    )
    path = tmp_path / "made" / name.replace("lightning", "metrics")
    if not content:
        state = json.loads((LOGS / "trainer_state.json").read_text())
        content = "".join(json.dumps(row) + "\n" for row in state["log_history"]).encode()
    follower = TrainerProgress(run, 0, str(path))
    follower.update()
    assert (follower.step, follower.rows) == (None, 0)
    assert "no such file: " in follower.missing()
    path.parent.mkdir()
    path.touch()
    for piece in pieces(content, len(name)):
        with path.open("ab") as stream:
            stream.write(piece)
        follower.update()
    follower.update(last=True)
    theirs = read_curve(path)
    assert_same(read_curve(run.path), theirs)
    assert follower.step == theirs.steps[-1] + (name == "lightning.csv")


def test_validation_losses_are_events(run: RunDir) -> None:
    path = LOGS / "hugging_face.log"
    replay(run, path.read_bytes())
    events = [(e.kind, e.step, *e.values.values()) for e in read_events(run, 0)]
    steps, losses = read_curve(path).series("val_loss")
    assert events == [("evaluation", *pair) for pair in zip(steps, losses, strict=True)]


def test_files_that_begin_anew(run: RunDir, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"

    def rows(*steps: int) -> str:
        return "".join(json.dumps({"step": n, "loss": 3.5 - n}) + "\n" for n in steps)

    path.write_text(rows(1, 2, 3))
    follower = TrainerProgress(run, 1, str(path))
    follower.update()
    assert follower.rows == 0, "of the attempt before"
    with path.open("a") as stream:
        stream.write(rows(2, 3, 4) + rows(5)[:12])
    follower.update()
    assert (follower.rows, follower.step) == (3, 4)
    path.write_text(rows(3))
    follower.update()
    assert (follower.rows, follower.step) == (4, 3), "written again from its beginning"
    path.unlink()
    follower.update()
    path.write_text(rows(4, 4, 5))
    follower.update(last=True)
    assert [row["step"] for row in rows_of(run, 1)] == [2, 3, 4, 3, 4, 5]
    assert read_curve(run.path).columns["loss"].tolist() == [1.5, 0.5, -0.5, -1.5]


def test_a_table_that_gets_another_column_is_not_read_twice(run: RunDir, tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    (folder / "version_0").mkdir(parents=True)
    (folder / "version_0" / "metrics.csv").write_text("step,train_loss\n1,3.5\n")
    follower = TrainerProgress(run, 0, str(folder / "version_*" / "metrics.csv"))
    path = folder / "version_1" / "metrics.csv"
    path.parent.mkdir()
    path.write_text("epoch,step,train_loss\n0,1,3.5\n0,2,3.25\n")
    follower.update()
    path.write_text("epoch,step,train_loss,val_loss\n0,1,3.5,\n0,2,3.25,\n0,2,,3.75\n0,3,3.0,\n")
    follower.update(last=True)
    assert [row["loss"] for row in rows_of(run)] == [3.5, 3.25, 3.0]
    assert [event.values for event in read_events(run, 0)] == [{"validation": 3.75}]


def test_events_that_grow(run: RunDir, tmp_path: Path) -> None:
    folder, now = tmp_path / "tb", time.time()
    earlier = [event(step, scalar("train/loss", 9.0)) for step in range(1, 5)]
    write_events(folder / "events.out.tfevents.1.a", earlier)
    events = [
        event(step, scalar(tag, value), wall_time=now)
        for step in range(1, 20)
        for tag, value in (("epoch", 0.1), ("train/loss", 4 - step / 8), ("train/grad_norm", 0.5))
    ]
    content = write_events(tmp_path / "all" / "events.out.tfevents.2.a", events).read_bytes()
    follower = TrainerProgress(run, 0, str(folder))
    for piece in pieces(content, 0):
        with (folder / "events.out.tfevents.2.a").open("ab") as stream:
            stream.write(piece)
        follower.update()
    follower.update(last=True)
    ours = read_curve(run.path)
    assert_same(ours, read_curve(tmp_path / "all"))
    assert ours.columns["time"].tolist() == [now + step for step in range(1, 20)]
    assert ours.columns["step_time_s"][1:] == pytest.approx(1.0)


def test_a_counter_that_restarts_and_steps_that_repeat(run: RunDir) -> None:
    lines = [f"step: {n} loss: {4 - n / 10} grad_norm: 1.0\n" for n in (1, 2, 2, 3, 2, 3, 4)]
    lines[2] = "step: 2 loss: 3.7 grad_norm: 1.0\n"
    follower = TrainerProgress(run, 0, "torch_titan")
    feed(follower, *lines, "step: 5 loss: 3.5")
    assert (follower.step, follower.rows) == (4, 7)
    follower.update(last=True)
    assert follower.step == 5
    curve = read_curve(run.path)
    assert curve.steps.tolist() == [1, 2, 3, 4, 5]
    assert curve.columns["loss"].tolist() == [3.9, 3.8, 3.7, 3.6, 3.5]
    assert (curve.restarts.tolist(), curve.overlap_rows) == ([], 2)


def test_times_of_rows(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    follower = TrainerProgress(run, 0, r"(?P<step>\d+) (?P<loss>\S+)(?: (?P<step_time_s>\S+))?")
    for clock[0], output in (
        (1010.0, "50 3.5\n"),
        (1060.0, "100 3.4\n"),
        (1160.0, "150 3.3\n200 nan\n"),
        (1170.0, "250 3.1 0.25\n"),
    ):
        feed(follower, output)
    rows = rows_of(run)
    assert [(row["time"], row.get("step_time_s")) for row in rows] == [
        *((1010.0, None), (1060.0, 1.0), (1110.0, 1.0), (1160.0, 1.0), (1170.0, 0.25))
    ]
    assert rows[3] == {"step": 200, "attempt": 0, "loss": None, "time": 1160.0, "step_time_s": 1.0}


def test_a_row_of_several_lines_is_written_when_the_output_pauses(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    line, first, _ = next(case[1:] for case in CASES if case[0] == "OLMo-core")
    follower = TrainerProgress(run, 0)
    feed(follower, line.format(step=first) + "\n")
    assert follower.rows == 0
    monkeypatch.setattr(following, "_PAUSE_S", -1.0)
    follower.update()
    assert follower.rows == 1
    # Rates of one device become those of the run.
    line, first, values = next(case for name, *case in CASES if name == "MaxText")
    follower = TrainerProgress(run, 1, devices=16)
    feed(follower, line.format(step=first) + "\n", last=True)
    (row,) = rows_of(run, 1)
    assert row["tokens_per_s"] == 16 * values["tokens_per_s"]


def test_a_trainer_that_prints_nothing_known(run: RunDir, tmp_path: Path) -> None:
    follower = TrainerProgress(run, 0, rank=3)  # the last of four, as for Megatron-LM
    feed(follower, "epoch 1 of 3\n" * 10, last=True)
    assert not run.metrics(0).exists()
    for text in (
        "rank 3 has printed 130 bytes, of which no line is of a known",
        "torchtitan",
        "(?P<step>",
    ):
        assert text in follower.missing()
    path = tmp_path / "x.jsonl"
    follower = TrainerProgress(run, 0, str(path))
    path.write_text('{"step": 1, "perplexity": 3.5}\n')
    follower.update()
    assert "none of its tags is known; there are perplexity; name it" in follower.missing()
    follower = TrainerProgress(run, 0, str(path))
    with path.open("a") as stream:
        stream.write('{"step": 2, "loss": 3.25, "tokens": NaN}\n')
        stream.write('{"step": 3, "loss": 3.0, "tokens": 64}\n')
    follower.update()
    assert (follower.step, follower.missing()) == (3, "")
    assert [(row["step"], row["tokens"]) for row in rows_of(run)] == [(2, None), (3, 64)]


def test_rows_without_the_trainers_progress_bar_are_numbered(run: RunDir) -> None:
    lines = [f"{{'loss': '{loss}', 'epoch': '0.1'}}\n" for loss in (3.5, 3.25, 3.0)]
    bars = "Writing model shards: 100%|█| 1/1 [00:00]\n"
    follower = TrainerProgress(run, 0)
    feed(follower, bars.join(lines), last=True)
    assert read_curve(run.path).steps.tolist() == [1, 2, 3]
    assert "numbered 1, 2, …: give `progress` the trainer's trainer_state" in follower.missing()


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([(1, 10), (2, 20), (3, 30)], [(3, 10), (4, 20)], [10, 20, 30, 40]),
        ([(1, 10), (2, 20), (3, 30)], [(3, 30), (4, 40)], [10, 20, 30, 40]),
        ([(1, 10), (2, 20)], [(4, 10), (5, 20)], [10, 20, None, None]),
    ],
)
def test_a_count_of_tokens_that_an_attempt_begins_again(
    first: list[tuple[int, int]],
    second: list[tuple[int, int]],
    expected: list[int | None],
    run: RunDir,
) -> None:
    for attempt, rows in enumerate((first, second)):
        lines = [f"step {step} loss 1.5 tokens {tokens}\n" for step, tokens in rows]
        feed(TrainerProgress(run, attempt), *lines, last=True)
    curve = read_curve(run.path)
    counts = [None if np.isnan(count) else count for count in curve.columns["tokens"]]
    assert counts == expected


def test_what_is_there_instead_is_said(run: RunDir, tmp_path: Path) -> None:
    follower = TrainerProgress(run, 0, "torchtitan")
    feed(follower, "loading\niteration 1, loss of 3.5\n", last=True)
    assert "which ends with 'iteration 1, loss of 3.5'" in follower.missing()
    (tmp_path / "log.jsonl").touch()
    for path, reason in (
        (tmp_path / "metrics.jsonl", f"no such file: .*; {tmp_path} has log.jsonl"),
        (tmp_path / "version_*" / "metrics.csv", f"no such file: .*; {tmp_path} has log.jsonl"),
        (tmp_path / "new" / "metrics.csv", "new has no files"),
    ):
        follower = TrainerProgress(run, 0, str(path))
        follower.update(last=True)
        assert re.search(reason, follower.missing())


def test_progress_of_a_recipe() -> None:
    for text in ("torchtitan", "megatron_lm", "hugging-face", "OLMo", "x.csv", "{run}/tb"):
        check_progress(text)
    check_progress(r"it (?P<step>\d+) (?P<loss>\S+)")
    for text, message in (
        ("torchtitans", "'torchtitans' is no known format; give one of slurmllm, NeMo or NxD"),
        ("", "'' is no known format"),
        ("NxD's", "is several formats; give one of NxD's examples, NxD's examples with"),
        (r"(?P<step>\d+", "progress '.*' is not a regular expression"),
        (r"(?P<step>\d+)", r"progress '.*' has no group \(\?P<loss>…\)"),
        (r"(?P<step>\d+) (?P<los>\d+)", "no metric 'los'"),
    ):
        with pytest.raises(ValueError, match=message):
            check_progress(text)


def test_nothing_is_lost_while_the_disk_is_full(run: RunDir) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    follower = TrainerProgress(run, 0, "torchtitan")
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (70, limits[1]))  # within the first row
        feed(follower, *(f"step: {step} loss: 3.5 grad_norm: 1.0\n" for step in (1, 2)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert run.metrics(0).stat().st_size == 70
    follower.update()
    assert [row["step"] for row in rows_of(run)] == [1, 2]


def test_a_pipe_in_place_of_the_metrics_delays_nothing(run: RunDir) -> None:
    os.mkfifo(run.metrics(0))
    follower, reader = TrainerProgress(run, 0, "torchtitan"), os.open(run.metrics(0), os.O_NONBLOCK)
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4096)
    feed(follower, *(f"step: {step} loss: 3.5 grad_norm: 1.0\n" for step in range(1, 100)))
    os.close(reader)
    assert follower.step == 99


def test_a_reader_that_fails_is_logged_once_and_recorded(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorded: dict[str, str] = {}
    launcher: Any = SimpleNamespace(
        run=run,
        attempt=run.attempt("train", 0),
        command=CommandConfig(run="theirs"),
        config=resolve("tiny_neox", "local"),
        record=SimpleNamespace(nodes=["n1"]),
        output=SimpleNamespace(take=bytes, printed=0),
        printing=0,
        save=recorded.update,
    )
    observer = TrainerObserver(launcher, None)
    monkeypatch.setattr(observer.progress, "update", lambda _: int("no step"))
    for _ in range(3):
        observer.observe()
    observer.close(finished=True)
    assert caplog.messages == ["progress cannot be read", recorded["progress_missing"]]
    assert "invalid literal for int()" in caplog.messages[1]
