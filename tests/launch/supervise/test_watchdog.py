"""When a run counts as hung, row by row, and what stacks show."""

import errno
import itertools
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import psutil
import pytest
from launch.supervise.starts import attempt_record

from slurmllm.core.config.operation import WatchdogConfig, leaving_s
from slurmllm.core.config.resolve import resolve
from slurmllm.core.errors import StorageError
from slurmllm.core.run.records import (
    AttemptRecord,
    FailureRecord,
    HangRecord,
    Heartbeat,
    NodeRecord,
    Phase,
    WorkerPhase,
)
from slurmllm.core.run.rundir import RunDir
from slurmllm.core.run.worker_files import PHASE_FILE, PhaseWriter, read_phase
from slurmllm.launch.supervise import attempt_monitor, attempts
from slurmllm.launch.supervise import watchdog as watchdogs
from slurmllm.launch.supervise.attempt_monitor import AttemptMonitor, Observations, StopSignals
from slurmllm.launch.supervise.notify import Notifier
from slurmllm.launch.supervise.stacks import (
    outliers,
    read_locations,
    stack_lines,
    stack_location,
    stacks_of,
)
from slurmllm.launch.supervise.watchdog import (
    Heartbeats,
    Watchdog,
    behind,
    find_hang,
    limit_s,
    recent_step_times,
    slow_step_s,
)

CONFIG = WatchdogConfig(start_up_s=100, first_step_s=1000, step_factor=10, min_step_s=60, save_s=50)
NODES = {0: "n1", 1: "n2", 2: "n3", 3: "n4"}


class Progress(NamedTuple):
    phases: dict[int, WorkerPhase]
    nodes: dict[int, str]
    unchanged_s: float
    unresponsive: tuple[str, ...] = ()


def beats(*places: tuple[Phase, int]) -> dict[int, WorkerPhase]:
    return {r: WorkerPhase(phase=p, step=s, since=0.0) for r, (p, s) in enumerate(places)}


ALIKE = beats(*[("stepping", 40)] * 4)
ONE_LATE = beats(("stepping", 41), ("stepping", 40), ("stepping", 41), ("stepping", 41))
SAVING = beats(("saving", 40), ("saving", 40), ("stepping", 40), ("stepping", 40))


@pytest.mark.parametrize(
    ("seen", "slow_s", "limit", "suspects"),
    [
        (Progress(ALIKE, NODES, 59.0), 1.0, None, ()),
        (Progress(ALIKE, NODES, 61.0), 1.0, 60.0, ()),
        (Progress(ALIKE, NODES, 61.0), 20.0, None, ()),  # this run's steps are long
        (Progress(ALIKE, NODES, 201.0), 20.0, 200.0, ()),
        (Progress(ONE_LATE, NODES, 61.0), 1.0, 60.0, ("n2",)),
        (Progress(ONE_LATE, NODES, 61.0, ("n3",)), 1.0, 60.0, ("n3",)),
        (Progress(ONE_LATE, NODES, 61.0, ("n1", "n2", "n3", "n4")), 1.0, 60.0, ("n2",)),
        (Progress(SAVING, NODES, 49.0), 1.0, None, ()),
        (Progress(SAVING, NODES, 51.0), 1.0, 50.0, ("n1", "n2")),
        (Progress(beats(*[("first_step", 40)] * 4), NODES, 999.0), 1.0, None, ()),  # compiling
        (Progress(beats(*[("first_step", 40)] * 4), NODES, 1001.0), 1.0, 1000.0, ()),
        (Progress(beats(("resuming", 0), ("starting", 0)), NODES, 101.0), None, 100.0, ("n2",)),
        (Progress(beats(*[("stepping", 41)] * 4), NODES, 61.0), None, None, ()),  # nothing learned
        (Progress(beats(("stopping", 40), ("stepping", 40)), NODES, 61.0), 1.0, 60.0, ("n2",)),
        (Progress({}, NODES, 1e9), 1.0, None, ()),
    ],
)
def test_the_judgement(
    seen: Progress, slow_s: float | None, limit: float | None, suspects: tuple[str, ...]
) -> None:
    result = find_hang(*seen, CONFIG, slow_s)
    assert (result and result.limit_s) == limit
    if result is not None:
        assert result.suspects == suspects
        assert result.waited_s == seen.unchanged_s > result.limit_s


def test_of_one_step_a_save_comes_before_the_next() -> None:
    assert limit_s("stopping", CONFIG, 1.0) == limit_s("saving", CONFIG, 1.0) == 50
    assert limit_s("evaluating", CONFIG, 1.0) == limit_s("first_step", CONFIG, 1.0)
    assert behind(beats(("saving", 40), ("evaluating", 40), ("stepping", 40))) == (1,)
    assert behind(beats(("evaluating", 40), ("stepping", 39))) == (1,)


def test_what_slow_means_is_learned_from_the_run(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert slow_step_s(recent_step_times(run)) is None
    for attempt, steps in ((0, 150), (1, 150)):
        path = run.metrics(attempt)
        path.parent.mkdir(exist_ok=True)
        times = [600.0, *([1.0] * (steps - 20)), *([4.0] * 20)]  # the first one compiled
        path.write_text("".join(f'{{"step": 1, "step_time_s": {t}}}\n' for t in times) + '{"st')
    result = recent_step_times(run)
    assert len(result) == 200
    assert max(result) == 4.0
    assert slow_step_s(result) == 4.0
    assert slow_step_s([1.0] * 99 + [9.0]) == 1.0


def limits_of(seconds: float) -> WatchdogConfig:
    names = ("start_up_s", "first_step_s", "min_step_s", "save_s")
    return WatchdogConfig(**dict.fromkeys(names, seconds))


def open_record(nodes: tuple[str, ...]) -> AttemptRecord:
    fields = {"nodes": nodes, "world_size": len(nodes), "started_at": time.time()}
    return attempt_record(job_id=None, **fields)


def test_heartbeats_and_metrics_keep_the_watchdog_quiet(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    watchdog = Watchdog(run, open_record(("n1", "n2")), limits_of(0.3))
    path = run.attempt("train", 0).heartbeat("n1")
    path.parent.mkdir(parents=True)
    run.metrics(0).parent.mkdir()
    for step in range(6):
        time.sleep(0.1)
        if step % 2:
            run.metrics(0).write_text("row\n" * step)
        else:
            beat = WorkerPhase(phase="first_step", step=step, since=0.0)
            Heartbeat(node="n1", written_at=0.0, ranks={0: beat}).save(path)
        assert watchdog.look() is None
    time.sleep(0.4)
    hang = watchdog.look()
    assert (hang.phase, hang.behind, hang.suspects) == ("starting", (1,), ("n2",))


@pytest.mark.parametrize(("silent", "reporting"), [(False, None), (True, None), (False, [1])])
def test_a_node_that_has_finished_is_no_suspect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: bool, reporting: list[int] | None
) -> None:
    clock, run = [0.0], RunDir(tmp_path)
    monotonic = SimpleNamespace(monotonic=lambda: clock[0], time=time.time)
    monkeypatch.setattr(watchdogs, "time", monotonic)
    monkeypatch.setattr(watchdogs, "UNRESPONSIVE_S", 8.0)
    attempt, nodes = run.attempt("train", 0), ("n1", "n2", "n3")
    attempt.heartbeat("n1").parent.mkdir(parents=True)
    NodeRecord(node="n2", pids={1: 9}, exit_codes={1: 0}).save(attempt.node("n2"))
    watchdog, hang = Watchdog(run, open_record(nodes), limits_of(20), reporting), None
    while hang is None:
        for rank, node in enumerate(nodes):
            if clock[0] == 0 or (node != "n2" and not silent):
                beat = WorkerPhase(phase="stepping", step=99 + (rank != 1), since=0.0)
                beats_of_node = Heartbeat(node=node, written_at=clock[0], ranks={rank: beat})
                beats_of_node.save(attempt.heartbeat(node))
        clock[0] += 4.0
        hang = watchdog.look()
    # If all that have not finished are silent, the shared file system may be to blame.
    assert (hang.unresponsive_nodes, hang.suspects) == (("n1", "n3") if silent else (), ())


def test_when_a_worker_has_ended_the_others_have_the_time_of_a_start(tmp_path: Path) -> None:
    watchdog = Watchdog(RunDir(tmp_path), open_record(("n1",)), CONFIG)
    path = RunDir(tmp_path).attempt("train", 0).heartbeat("n1")
    path.parent.mkdir(parents=True)
    for ranks, phase in ((beats(("stepping", 3)), "stepping"), ({}, "starting")):
        Heartbeat(node="n1", written_at=0.0, ranks=ranks).save(path)
        watchdog._next_read = 0.0
        assert watchdog.look() is None
        assert watchdog.phases[0].phase == phase


def test_a_supervisor_that_was_frozen_starts_all_clocks_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, hangs = [0.0], []
    monotonic = SimpleNamespace(monotonic=lambda: clock[0], time=time.time)
    monkeypatch.setattr(watchdogs, "time", monotonic)
    watchdog = Watchdog(RunDir(tmp_path), open_record(("n1", "n2")), limits_of(10))
    for seconds in (9.0, watchdogs.UNRESPONSIVE_S, 9.0, 2.0):  # the second: it was frozen
        clock[0] += seconds
        hangs.append(watchdog.look())
    assert hangs[:3] == [None] * 3
    assert (hangs[3].waited_s, hangs[3].unresponsive_nodes) == (11.0, ())


def test_stacks_of_a_worker_that_sleeps_and_of_one_that_is_stopped(tmp_path: Path) -> None:
    attempt = RunDir(tmp_path).attempt("train", 0)
    attempt.path.mkdir(parents=True)
    result = Heartbeats(attempt, "n1", CONFIG)
    code = (
        "import time; from slurmllm.core.run.worker_files import PhaseWriter; "
        "from slurmllm.train.exits import dump_on_signal; dump_on_signal(); "
        "PhaseWriter.from_environment().begin('stepping', 7); print(flush=True); time.sleep(100)"
    )
    workers = {}
    for rank in (0, 1):
        env, command = {**os.environ, **result.environment(rank)}, [sys.executable, "-c", code]
        workers[rank] = subprocess.Popen(command, stdout=subprocess.PIPE, env=env)
    try:
        pids = {rank: worker.pid for rank, worker in workers.items()}
        for worker in workers.values():
            worker.stdout.readline()
        result.update(pids)
        beat = Heartbeat.load(attempt.heartbeat("n1"))
        places = {rank: (phase.phase, phase.step) for rank, phase in beat.ranks.items()}
        assert places == dict.fromkeys((0, 1), ("stepping", 7))
        os.kill(pids[1], signal.SIGSTOP)
        result.dump_stacks(pids)
        assert "most recent call first" in attempt.stacks(0).read_text()
        assert attempt.stacks(1).read_text().startswith("no answer; state T (stopped)")
    finally:
        for worker in workers.values():
            worker.kill()
            worker.communicate()
        result.close()
    assert not any(Path(path).exists() for path in result.environment(0).values())


def test_a_node_writes_changes_every_five_seconds_and_a_sign_of_life_every_fifteen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt, clock = RunDir(tmp_path).attempt("train", 0), [1000.0]
    monkeypatch.setattr(
        watchdogs, "time", SimpleNamespace(monotonic=lambda: clock[0], time=lambda: clock[0])
    )
    heartbeats, seen = Heartbeats(attempt, "n1", CONFIG), []
    phases = PhaseWriter(Path(heartbeats.environment(0)[PHASE_FILE]))
    for clock[0] in (1000.0, 1000.5, 1002.0, 1004.9, 1005.0, 1019.0, 1020.0, 1034.0, 1035.0):
        if clock[0] <= 1005.0:
            phases.begin("stepping", int(clock[0]))
        heartbeats.update({0: 1})
        beat = Heartbeat.load(attempt.heartbeat("n1"))
        seen.append((beat.written_at, beat.ranks[0].step))
    heartbeats.close()
    # Files of workers are read once a second: at 1005.0 those of 1004.9 are known.
    assert seen[:4] == [(1000.0, 1000)] * 4
    assert [written for written, _ in seen[4:]] == [1000.0, 1019.0, 1019.0, 1034.0, 1034.0]
    assert seen[-1][1] == 1005


def test_files_of_a_killed_launcher_go_and_those_of_a_living_one_stay(tmp_path: Path) -> None:
    attempt = RunDir(tmp_path).attempt("train", 0)
    killed = Heartbeats(attempt, "n1", CONFIG)
    folder = Path(killed.environment(0)[PHASE_FILE]).parent
    living = Heartbeats(attempt, "n2", CONFIG)
    assert folder.is_dir()
    killed._lock.close()  # as its end does
    Heartbeats(attempt, "n3", CONFIG).close()
    assert not folder.exists()
    assert Path(living.environment(0)[PHASE_FILE]).parent.is_dir()
    living.close()


def test_a_phase_is_read_back_and_rubbish_is_not(tmp_path: Path) -> None:
    path = tmp_path / "0"
    assert read_phase(path) is None
    phases = PhaseWriter(path)
    phases.begin("first_step", 1_000_000)
    phases.begin("saving", 3)
    beat = read_phase(path)
    assert (beat.phase, beat.step) == ("saving", 3)
    path.write_text("dreaming 3 1.0\n")
    assert read_phase(path) is None


WAITS = """Thread 0x1 (most recent call first):
  File "/lib/queue.py", line 180 in get

Current thread 0x2 (most recent call first):
  File "/site-packages/torch/distributed/distributed_c10d.py", line 3000 in all_gather_object
  File "/x/slurmllm/train/backends/native/runtime.py", line 70 in gather
  File "/x/slurmllm/train/loop.py", line 90 in train
"""
READS = """Current thread 0x2 (most recent call first):
  File "/lib/python3.11/socket.py", line 706 in readinto
  File "/x/slurmllm/data/stream.py", line 70 in next_batch
  File "/x/slurmllm/train/loop.py", line 90 in train
"""
SPIED = """no answer; state S (sleeping), waits in futex_do_wait
Thread 4711 (idle): "MainThread"
    next_batch (slurmllm/data/stream.py:70)
"""


def test_outliers() -> None:
    places = {0: stack_location(WAITS), 1: stack_location(READS), 2: stack_location(WAITS)}
    assert outliers(places) == (1,)
    assert stack_lines(places) == (
        "rank 1: readinto (python3.11/socket.py:706) from next_batch (data/stream.py:70)",
        "ranks 0, 2: all_gather_object (distributed/distributed_c10d.py:3000) from gather "
        "(native/runtime.py:70)",
    )
    for texts, expected in (((WAITS, SPIED), (1,)), ((READS, READS), ()), ((WAITS,), ()), ((), ())):
        assert outliers(dict(enumerate(map(stack_location, texts)))) == expected
    alike = dict(enumerate(map(stack_location, (WAITS, WAITS))))
    assert stack_lines(alike)[0].startswith("ranks 0, 1: all_gather")
    assert stack_location("").text == "no Python frames"


SLEEPS = "process 7, python: state S (sleeping), waits in hrtimer_nanosleep\n"
POLLS = "process 7, python: state S (sleeping), waits in poll_schedule_timeout.constprop.0\n"
LOCKED = "process 7, python: state S (sleeping), waits in futex_do_wait\n"
STOPPED = "process 9, pt_data_worker: no answer; state T (stopped), waits in do_signal_stop\n"
SPINS = "process 7, python: state R (running), waits in 0\n"
READS_DISK = "process 7, python: state D (disk sleep), waits in folio_wait_bit\n"
PIPED = "process 6, bash: state S (sleeping), waits in do_wait\n"
IN_BACKWARD = f"""{LOCKED}Thread 7 (idle): "MainThread"
    backward (torch/autograd/graph.py:979)
    <module> (ddp.py:26)
"""
IN_LOADER = f"""{LOCKED}Thread 7 (idle): "MainThread"
    next_batch (loader.py:23)
    <module> (ddp.py:26)
Thread 8 (idle): "Thread-1"
    run (torch/utils/data/pin_memory.py:52)
"""
IN_RECEIVE = f"{POLLS}Thread 7 (idle)\n    receive (mini.py:56)\n    <module> (mini.py:83)\n"
ASLEEP = f"{SLEEPS}Thread 7 (idle)\n    fault (mini.py:35)\n    <module> (mini.py:83)\n"


@pytest.mark.parametrize(
    ("dumps", "ranks", "line"),
    [
        ((POLLS, SLEEPS), (1,), "rank 1: python: state S (sleeping), waits in hrtimer"),
        ((POLLS, LOCKED, PIPED + SLEEPS, LOCKED), (2,), "rank 2: python: state S"),
        ((LOCKED, READS_DISK), (1,), "rank 1: python: state D (disk sleep)"),
        ((LOCKED, LOCKED, SPINS), (2,), "rank 2: python: state R (running)"),
        ((SPINS, SPINS, LOCKED), (2,), "rank 2"),  # NCCL waits by computing
        ((SLEEPS, SLEEPS, POLLS), (2,), "rank 2"),
        ((LOCKED, LOCKED, LOCKED, SLEEPS, SLEEPS), (3, 4), "ranks 3, 4: python: state S"),
        ((POLLS + STOPPED, POLLS, POLLS), (0,), "rank 0: pt_data_worker: no answer; "),
        ((STOPPED, STOPPED), (), "ranks 0, 1: pt_data_worker: no answer; state T"),
        ((LOCKED, SPINS), (), "rank 0: python: state S"),
        ((SLEEPS, SLEEPS), (), "ranks 0, 1: python: state S"),
        ((IN_BACKWARD, IN_LOADER), (1,), "rank 1: next_batch (loader.py:23)"),
        ((IN_RECEIVE, ASLEEP), (1,), "rank 1: fault (mini.py:35)"),
        ((IN_RECEIVE, IN_RECEIVE), (), "ranks 0, 1: receive (mini.py:56)"),
    ],
)
def test_the_rank_that_waits_for_something_else_is_named(
    dumps: tuple[str, ...], ranks: tuple[int, ...], line: str
) -> None:
    locations = dict(enumerate(map(stack_location, dumps)))
    assert outliers(locations) == ranks
    assert stack_lines(locations)[0].startswith(line)
    named = "".join(text.partition(":")[0] for text in stack_lines(locations))
    assert sorted(map(int, re.findall(r"\d+", named))) == [*range(len(dumps))]


def test_the_ranks_that_a_worker_starts_are_told_apart(tmp_path: Path) -> None:
    child = (
        "import os, sys, time; time.sleep(60) if os.environ['RANK'] == '3' else sys.stdin.read()"
    )
    code = f"""
import os, subprocess, sys
for rank in "23":
    command = [sys.executable, "-c", {child!r}]
    subprocess.Popen(command, env={{**os.environ, "RANK": rank, "WORLD_SIZE": "4"}}, stdin=-1)
print(flush=True)
sys.stdin.read()
"""
    environment = {**os.environ, "RANK": "1", "WORLD_SIZE": "2"}
    launcher = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    attempt = RunDir(tmp_path).attempt("train", 0)
    attempt.stacks(1).parent.mkdir(parents=True)
    try:
        launcher.stdout.readline()
        while True:
            attempt.stacks(1).write_text(stacks_of(launcher.pid, 0.0))
            locations = read_locations(attempt)
            if "nanosleep" in locations.get(3, stack_location("")).text:
                break
            time.sleep(0.05)
    finally:
        for process in psutil.Process(launcher.pid).children():
            process.kill()
        launcher.kill()
        launcher.communicate()
    assert sorted(locations) == [2, 3]
    assert {location.worker for location in locations.values()} == {1}


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
        self.stop.name, self.stop.received_at = "SIGUSR1", self.now

    def end(self) -> None:
        self.code = 0

    def report(self, exit_code: int, message: str) -> None:
        """Have the second node report that its worker failed."""
        paths = self.run.attempt("train", 0)
        NodeRecord(node="n2", pids={1: 9}, exit_codes={1: exit_code}).save(paths.node("n2"))
        fields: dict[str, Any] = {"rank": 1, "node": "n2", "error": "RuntimeError", "time": 1.0}
        fields |= {"message": message, "blame": "code", "exit_code": exit_code}
        FailureRecord.model_validate(fields).save(paths.failure(1))

    def monitor(
        self,
        job_limited: bool = True,
        hang: HangRecord | None = None,
        kill_wait_s: float = math.inf,
    ) -> Observations:
        record = attempt_record(job_id="7" if job_limited else None)
        record.save(self.run.attempt("train", 0).record)
        config = resolve("tiny_neox")
        notifier = Notifier(self.run, config)
        monitor = AttemptMonitor(
            self.run, record, config, [cast(Any, self)], self.stop, notifier, None, kill_wait_s
        )
        monitor._watchdog = cast(Any, SimpleNamespace(look=lambda: hang, phases={}))
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


def test_after_sigterm_workers_end_before_slurm_kills_the_supervisor(launchers: Launchers) -> None:
    launchers.stop.name, launchers.at = "SIGTERM", {60.0: launchers.end}
    assert launchers.monitor(kill_wait_s=30.0).overran_s == pytest.approx(25.0, abs=0.3)
    assert launchers.killed_at() == pytest.approx(25.0, abs=0.3)


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
    assert launchers.monitor().superseded_by == 1
    assert launchers.killed_at() == pytest.approx(20.0, abs=attempt_monitor.LOOK_S + 0.2)


def test_a_file_system_that_refuses_for_a_moment_ends_nothing(
    launchers: Launchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = refuse_a_look(monkeypatch, "failures", "001")
    launchers.at[20.0] = launchers.end
    assert (refusing, launchers.monitor().hang, launchers.signals) == ([], None, {})


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
