"""When an attempt is told to save, and when it is killed, on a clock of the test."""

from __future__ import annotations

import errno
import itertools
import signal
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from launch.supervise.starts import attempt_record

from slurmllm.core.config.operation import leaving_s
from slurmllm.core.config.resolve import resolve
from slurmllm.core.errors import StorageError
from slurmllm.core.run.records import AttemptRecord, FailureRecord, HangRecord, NodeRecord
from slurmllm.core.run.rundir import RunDir
from slurmllm.launch.supervise import attempt_monitor, attempts
from slurmllm.launch.supervise.attempt_monitor import AttemptMonitor, Observations, StopSignals

HANG = HangRecord(found_at=0.0, phase="stepping", step=7, waited_s=90.0, limit_s=60.0)


class Launchers:
    """The srun of an attempt of two nodes, which ends when it is killed, and a clock.

    Attributes:
        signals: Second → signal sent to it.
        at: Second → what happens then.
    """

    def __init__(self, run: RunDir, patch: pytest.MonkeyPatch) -> None:
        self.run, self.signals, self.at = run, dict[float, signal.Signals](), {}
        self.now, self.code = 0.0, None
        self.stop = StopSignals()
        clock = SimpleNamespace(monotonic=lambda: self.now, time=time.time, sleep=self.sleep)
        patch.setattr(attempt_monitor, "time", clock)

    def sleep(self, seconds: float) -> None:
        self.now = round(self.now + seconds, 3)
        for second in [second for second in self.at if second <= self.now]:
            self.at.pop(second)()
        assert self.now < 900.0, "nobody ends them"

    def poll(self) -> int | None:
        return self.code

    def send_signal(self, number: signal.Signals) -> None:
        self.signals[self.now] = number
        if number == signal.SIGKILL:
            self.code = -9

    def request_stop(self) -> None:
        self.stop.name, self.stop.at = "SIGUSR1", self.now

    def end(self) -> None:
        self.code = 0

    def report(self, exit_code: int, message: str) -> None:
        """Have the second node report that its worker failed."""
        paths = self.run.attempt("train", 0)
        NodeRecord(node="n2", pids={1: 9}, exit_codes={1: exit_code}).save(paths.node("n2"))
        fields: dict[str, Any] = {"rank": 1, "node": "n2", "error": "RuntimeError", "time": 1.0}
        fields |= {"message": message, "blame": "code", "exit_code": exit_code}
        FailureRecord.model_validate(fields).save(paths.failure(1))

    def monitor(self, job_limited: bool = True, hang: HangRecord | None = None) -> Observations:
        record = attempt_record(job_id="7" if job_limited else None)
        record.save(self.run.attempt("train", 0).record)
        config = resolve("tiny_neox")
        monitor = AttemptMonitor(self.run, record, config, [cast(Any, self)], self.stop)
        monitor._watchdog = cast(Any, SimpleNamespace(look=lambda: hang))
        return monitor.wait()

    def killed_at(self) -> float | None:
        kills = [second for second, number in self.signals.items() if number == signal.SIGKILL]
        return min(kills, default=None)


@pytest.fixture
def launchers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launchers:
    return Launchers(RunDir(tmp_path / "r"), monkeypatch)


@pytest.mark.parametrize("job_limited", [True, False])
def test_a_stop_signal_is_repeated_until_the_time_limit_is_near(
    launchers: Launchers, job_limited: bool
) -> None:
    limit_s = leaving_s(resolve("tiny_neox").recipe.slurm.signal_lead_s)
    launchers.at = {10.0: launchers.request_stop, 10.0 + limit_s + 30.0: launchers.end}
    observed = launchers.monitor(job_limited)
    requests = [at for at, number in launchers.signals.items() if number == signal.SIGUSR2]
    assert requests[0] == pytest.approx(10.0, abs=0.2)
    assert {round(b - a, 1) for a, b in itertools.pairwise(requests)} == {5.0}
    assert not observed.failed_first
    if job_limited:
        assert launchers.killed_at() == pytest.approx(10.0 + limit_s, abs=0.3)
        assert observed.overran_s == pytest.approx(limit_s, abs=0.3)
    else:
        assert (launchers.killed_at(), observed.overran_s) == (None, None)


def refuse_a_look(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[str]:
    refusing, is_dir = [*names], Path.is_dir

    def refuse(path: Path) -> bool:
        if path.name in refusing:
            refusing.remove(path.name)
            raise OSError(errno.ESTALE, "Stale file handle")
        return is_dir(path)

    monkeypatch.setattr(Path, "is_dir", refuse)
    return refusing


def test_a_hang_leaves_the_launchers_time_for_their_stacks(
    launchers: Launchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_a_look(monkeypatch, "001")  # for a newer attempt
    observed = launchers.monitor(hang=HANG)
    assert HangRecord.load(launchers.run.attempt("train", 0).hang) == observed.hang == HANG
    begun = observed.launchers_s - attempt_monitor.HANG_GRACE_S
    assert 0.0 < begun <= attempt_monitor.LOOK_S + 1.0
    assert (observed.first_symptom_at or 0.0) == pytest.approx(time.time() - HANG.waited_s, abs=5)


def test_a_newer_attempt_ends_this_one(launchers: Launchers) -> None:
    launchers.at[20.0] = launchers.run.attempt("train", 1).path.mkdir
    observed = launchers.monitor()
    assert observed.superseded_by == 1
    assert launchers.killed_at() == pytest.approx(20.0, abs=attempt_monitor.LOOK_S + 0.2)


def test_a_file_system_that_refuses_for_a_moment_ends_nothing(
    launchers: Launchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = refuse_a_look(monkeypatch, "failures", "001")
    launchers.at[20.0] = launchers.end
    observed = launchers.monitor()
    assert (refusing, observed.hang, launchers.signals) == ([], None, {})


LOST_PEER = "Connection closed by peer"


@pytest.mark.parametrize(
    ("exit_code", "message", "grace_s"),
    [
        (-9, LOST_PEER, attempt_monitor.CLEAR_GRACE_S),
        (70, "shapes do not match", attempt_monitor.CLEAR_GRACE_S),
        (70, LOST_PEER, attempt_monitor.REPORTED_GRACE_S),  # of n1, which is silent: it is dead
        (StorageError.exit_code, LOST_PEER, attempt_monitor.LAUNCHER_GRACE_S),
    ],
)
def test_the_others_get_some_seconds_after_the_first_failure(
    launchers: Launchers, exit_code: int, message: str, grace_s: float
) -> None:
    launchers.at = {30.2: partial(launchers.report, exit_code, message)}
    observed = launchers.monitor()
    assert observed.failed_first
    # A look is due every half second.
    assert 0.0 <= (launchers.killed_at() or 0.0) - 30.2 - grace_s < 0.8


def test_a_node_that_has_reported_is_read_no_more(
    launchers: Launchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, requests = attempts.node_records, list[tuple[str, ...]]()

    def count(run: RunDir, record: AttemptRecord, names: Sequence[str]) -> dict[str, NodeRecord]:
        requests.append(tuple(names))
        return read(run, record, names)

    monkeypatch.setattr(attempts, "node_records", count)
    launchers.at = {30.2: partial(launchers.report, 70, LOST_PEER)}
    launchers.monitor()
    assert requests[0] == ("n1", "n2")
    assert set(requests[1:]) == {("n1",)}
