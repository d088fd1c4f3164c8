"""The merged logs of several workers, and the first failing worker."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_records import make_attempt, save_attempt
from present import present

from slurmllm.analysis.status import logs as run_logs
from slurmllm.analysis.status.details import culprit, failed_attempts
from slurmllm.analysis.status.logs import GrowingLog, LogSelection, MergedLogs, last_lines, text_of
from slurmllm.core.log import message_of
from slurmllm.core.run.records import FailureRecord, HangRecord, NodeRecord
from slurmllm.core.run.rundir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "r")


def attempt(run: RunDir, number: int = 0, ending: str | None = "code_error", **more: Any) -> None:
    fields = {"world_size": 4, "started_at": float(number), "class": ending}
    save_attempt(run, number, nodes=("a", "b"), **(fields | more))


def node(run: RunDir, name: str, codes: dict[int, int], **more: Any) -> None:
    pids = dict.fromkeys(codes, 1)
    record = NodeRecord(node=name, pids=pids, exit_codes=codes, **more)
    record.save(run.attempt("train", 0).node(name))


def failure(run: RunDir, rank: int, at: float, message: str) -> None:
    fields = {"rank": rank, "node": "ab"[rank // 2], "error": "RuntimeError", "blame": "code"}
    fields |= {"message": message, "exit_code": 70, "time": at}
    FailureRecord.model_validate(fields).save(run.attempt("train", 0).failure(rank))


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as stream:
        stream.write(data)


def test_attempts_ranks_and_new_lines(run: RunDir) -> None:
    log = run.stage_log("train")
    write(log, b"train attempt 0: 2 node(s): a b\nstep 1\ntrain attempt 0: hang \xe2\x86\x92 x\n")
    write(log, b"train attempt 1: 2 node(s): a b\nhal")
    write(run.worker_log("train", 0, 3), b"three\n")
    write(run.worker_log("train", 0, 1), b"one \x00\xff\x1b[31mred\x1b[0m\n10%\r20%\n")
    write(run.worker_log("train", 0, 2), b"not wanted\n")
    merged = MergedLogs(LogSelection(run, ("train",), frozenset({0, 1, 3})))
    assert [line[1:] for line in merged.poll()] == [
        (0, 0, "train attempt 0: 2 node(s): a b"),
        (0, 0, "step 1"),
        (0, 1, "one \ufffdred"),
        (0, 1, "20%"),
        (0, 3, "three"),
        (0, 0, "train attempt 0: hang → x"),
        (1, 0, "train attempt 1: 2 node(s): a b"),
    ]
    write(run.worker_log("train", 1, 1), b"new")
    write(log, b"f\n")
    assert [line[1:] for line in merged.poll()] == [(1, 0, "half")]
    assert [line[1:] for line in merged.poll(last=True)] == [(1, 1, "new")]
    only = MergedLogs(LogSelection(run, ("train",), attempt=1))
    assert [line.text for line in only.poll(last=True)][1:] == ["half", "new"]


def test_the_last_lines_of_every_log(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    write(run.stage_log("train"), b"train attempt 0: 2 node(s): a b\nx\n")
    write(run.stage_log("train"), b"train attempt 1: 2 node(s): a b\ny\n")
    write(run.worker_log("train", 1, 1), b"1\n2\n3\n")
    attempt(run, 1)
    assert last_lines(run, make_attempt(), 0, 1) == ["x"]  # not of the attempt after it
    with monkeypatch.context() as patched:  # of many failed workers, none reads the stage's log
        patched.setattr(run_logs, "MergedLogs", None)
        assert last_lines(run, make_attempt(1), 1, 2) == ["2", "3"]
    merged = MergedLogs(LogSelection(run, ("train",), newest=True))
    assert [line[1:] for line in merged.poll_last(2)] == [
        (1, 0, "train attempt 1: 2 node(s): a b"),
        (1, 0, "y"),
        (1, 1, "2"),
        (1, 1, "3"),
    ]


def test_ranks_are_merged_by_time(run: RunDir) -> None:
    def record(second: int, rank: int, message: str) -> bytes:
        time = f"2026-11-23T08:31:{second:02d}.000+00:00"
        return f"{time} ERROR n{rank} rank {rank} slurmllm.train: {message}\n".encode()

    begin = record(0, 0, "train attempt 0: 2 node(s): a b")
    end = record(9, 0, "train attempt 0: hang → x")
    middle = record(2, 0, "b") + b"after b\n" + record(5, 0, "d")
    write(run.stage_log("train"), begin + middle + end)
    # A clock that is set back does not reorder the lines of a file.
    rank_1 = b"no time\n" + record(1, 1, "a") + record(3, 1, "c") + record(2, 1, "later")
    write(run.worker_log("train", 0, 1), rank_1 + record(12, 1, "e"))
    merged = MergedLogs(LogSelection(run, ("train",)))
    lines = [(line.rank, message_of(line.text)) for line in merged.poll(last=True)]
    assert lines == [
        *((1, "no time"), (0, "train attempt 0: 2 node(s): a b"), (1, "a"), (0, "b")),
        *((0, "after b"), (1, "c"), (1, "later"), (0, "d"), (1, "e")),
        (0, "train attempt 0: hang → x"),
    ]
    write(run.worker_log("train", 0, 1), b"more\n")
    assert [line.text for line in merged.poll()] == ["more"]


@given(st.binary(max_size=300), st.integers(1, 8))
def test_reading_from_the_end_equals_reading_from_the_start(data: bytes, lines: int) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setattr(run_logs, "_BLOCK_BYTES", 16)
        path = Path(folder) / "log"
        path.write_bytes(data)
        whole, end = GrowingLog(path), GrowingLog(path)
        end.skip_to_last(lines)
        expected = [*whole.lines(), *whole.flush()]
        assert expected == [text_of(line) for line in data.split(b"\n")][: len(expected)]
        assert [*end.lines(), *end.flush()] == expected[-lines:]


def test_a_long_line_is_split_and_a_truncated_file_read_again(run: RunDir) -> None:
    path = run.worker_log("train", 0, 1)
    write(path, b"x" * 3_000_000)
    log = GrowingLog(path)
    assert sum(len(text) for text in (*log.lines(), *log.flush())) == 3_000_000
    path.write_bytes(b"again\n")
    assert list(log.lines()) == ["again"]


def test_the_first_failure_of_its_own_is_the_culprit(run: RunDir) -> None:
    attempt(run, blamed_nodes=("b",))
    node(run, "a", {0: 70, 1: 70})
    node(run, "b", {2: 70, 3: 70})
    failure(run, 0, 1.0, "Connection closed by peer [127.0.0.1]:1")
    failure(run, 3, 3.0, "later")
    failure(run, 2, 2.0, "the cause")
    first = culprit(run, failed_attempts(run, ("train",))[-1])
    assert (first.rank, first.node, first.how) == (2, "b", ("ended with exit code 70",))
    assert present(first.failure).message == "the cause"


def test_without_failure_records_exit_codes_and_logs_decide(run: RunDir) -> None:
    attempt(run, ending=None)  # it is failing
    node(run, "a", {0: -9, 1: -9}, stopped_ranks=(0,))
    node(run, "b", {2: 1, 3: 0})
    record = failed_attempts(run, ("train",))[-1]
    assert (culprit(run, record).rank, culprit(run, record).how) == (1, ("ended by SIGKILL",))
    write(run.worker_log("train", 0, 2), b"CUDA out of memory. Tried to allocate 2 GiB\n")
    assert culprit(run, record).rank == 2
    assert last_lines(run, record, 2, 5) == ["CUDA out of memory. Tried to allocate 2 GiB"]


@pytest.mark.parametrize("blamed", [("b",), ()])
def test_a_lost_node_comes_before_lost_peers(run: RunDir, blamed: tuple[str, ...]) -> None:
    attempt(run, ending="node_failure", blamed_nodes=blamed)
    node(run, "a", {0: 3, 1: 3})
    for rank in (0, 1):
        failure(run, rank, 1.0, "Connection closed by peer [127.0.0.1]:1")
    first = culprit(run, failed_attempts(run, ("train",))[-1])
    assert (first.rank, first.node) == (2, "b")
    assert "b stopped responding" in first.how[0]


def test_a_hang_names_who_is_behind(run: RunDir) -> None:
    attempt(run, ending="hang")
    node(run, "a", {0: -9, 1: -9}, stopped_ranks=(0, 1))
    node(run, "b", {2: -9, 3: -9}, stopped_ranks=(2, 3))
    hang = HangRecord(found_at=1.0, phase="stepping", step=7, waited_s=60, limit_s=50, behind=(3,))
    hang.save(run.attempt("train", 0).hang)
    first = culprit(run, failed_attempts(run, ("train",))[-1])
    assert (first.rank, first.node) == (3, "b")
    assert "after step 7" in first.how[0]


def test_endings_without_failure(run: RunDir) -> None:
    for number, ending in enumerate(("done", "advance_signal", "cancelled", "superseded")):
        attempt(run, number, ending)
    assert failed_attempts(run, ("precompile", "train")) == []
