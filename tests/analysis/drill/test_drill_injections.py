"""Finding and signalling the processes of a run, on processes that only have the names."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from made_records import save_attempt

from slurmllm.analysis.drill import injector
from slurmllm.analysis.drill.injector import FaultKind, FaultSpec, Injection, inject
from slurmllm.core.errors import NodeError
from slurmllm.core.run.records import AttemptRecord, NodeRecord
from slurmllm.core.run.rundir import RunDir

SLEEP = "import time; time.sleep(60)"
FORK = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]]).wait()"
Spawn = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "r")
    run.checkpoints.mkdir(parents=True)
    save_attempt(run, nodes=("local0", "local1"))
    return run


@pytest.fixture
def spawn(run: RunDir) -> Iterator[Spawn]:
    started: list[subprocess.Popen[bytes]] = []

    def start(verb: str, node: str = "", code: str = SLEEP) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", code, SLEEP, "slurmllm", verb, str(run.path)]
        process = subprocess.Popen(command, env={**os.environ, "SLURMLLM_NODE": node})
        started.append(process)
        command_line = Path(f"/proc/{process.pid}/cmdline")  # another one between fork and exec
        while verb.encode() not in command_line.read_bytes():
            time.sleep(0.01)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def metrics(run: RunDir, step: int, attempt: int = 0) -> None:
    run.metrics(attempt).parent.mkdir(exist_ok=True)
    with run.metrics(attempt).open("a") as stream:
        stream.write(f'{{"step":{step},"attempt":{attempt}}}\n')


def spec(kind: FaultKind, at_step: int = 3, node: str = "local1", rank: int = 1) -> FaultSpec:
    return FaultSpec(kind=kind, attempt=0, node=node, rank=rank, at_step=at_step, local=True)


def test_only_the_runs_own_processes_are_found(run: RunDir, spawn: Spawn) -> None:
    pids = {verb: spawn(verb).pid for verb in ("supervise", "launch", "worker", "logs")}
    assert injector.find_processes(RunDir(run.path.with_name("r2"))) == []
    processes = {p.role: p.pid for p in injector.find_processes(run) if p.role}
    assert processes == {verb: pid for verb, pid in pids.items() if verb != "logs"}


def test_a_nodes_processes_are_its_launcher_and_all_below(run: RunDir, spawn: Spawn) -> None:
    launcher = spawn("launch", "local1", FORK)
    spawn("launch", "local10")
    deadline = time.monotonic() + 300
    while len(injector.node_pids(run, "local1")) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    first, child = injector.node_pids(run, "local1")
    assert first == launcher.pid
    assert len(injector.node_pids(run)) == 3
    injector.kill([first, child, first])
    assert launcher.wait(10) == -signal.SIGKILL
    assert injector.node_pids(run, "local1") == []


def test_a_process_id_of_another_machine_is_not_signalled(run: RunDir, spawn: Spawn) -> None:
    stranger = spawn("logs")
    NodeRecord(node="local1", pids={1: stranger.pid}).save(run.attempt("train", 0).node("local1"))
    for rank in (0, 1):
        with pytest.raises(NodeError, match=f"rank {rank} of attempt 0 of r does not run here"):
            injector.signal_worker(run, 0, "local1", rank)
    assert stranger.poll() is None


@pytest.mark.parametrize(
    ("folders", "step"),
    [
        ([], None),
        (["step_00000010"], None),
        ([".step_00000010.tmp"], 10),
        (["step_00000010", ".step_00000010.replaced", ".step_00000020.003.tmp"], 20),
        (["step_00000020", ".step_00000010.000.tmp"], None),  # left by a dead attempt
    ],
)
def test_a_save_is_seen(run: RunDir, folders: list[str], step: int | None) -> None:
    for name in folders:
        (run.checkpoints / name).mkdir()
    assert injector.save_in_progress(run) == step


def injected(run: RunDir, fault: FaultSpec, then: Callable[[], None]) -> Injection:
    """What an agent does once something has happened; before that it must wait."""
    done: list[Injection] = []
    agent = threading.Thread(target=lambda: done.append(inject(run, fault)))
    agent.start()
    time.sleep(0.05)
    assert agent.is_alive()
    then()
    agent.join(10)
    assert Injection.load(run.drill) == done[0]
    return done[0]


@pytest.mark.parametrize(
    ("kind", "number"), [("worker", signal.SIGKILL), ("save", signal.SIGKILL), ("hang", None)]
)
def test_a_worker_is_hit_at_its_step(
    run: RunDir, spawn: Spawn, kind: FaultKind, number: signal.Signals | None
) -> None:
    worker = spawn("worker", "local1")
    NodeRecord(node="local1", pids={1: worker.pid}).save(run.attempt("train", 0).node("local1"))
    metrics(run, 2)

    def moment() -> None:
        if kind == "save":
            (run.checkpoints / ".step_00000003.tmp").mkdir()  # the first one is let pass
            time.sleep(0.05)
            assert worker.poll() is None
            (run.checkpoints / ".step_00000003.tmp").rename(run.checkpoint(3))
            (run.checkpoints / ".step_00000006.tmp").mkdir()
        metrics(run, 4)

    done = injected(run, spec(kind), moment)
    assert (done.missed, done.pids) == ("", (worker.pid,))
    assert done.step == (6 if kind == "save" else 4)
    if number is not None:
        assert worker.wait(10) == -number
    else:
        assert os.WIFSTOPPED(os.waitpid(worker.pid, os.WUNTRACED)[1])


def test_the_first_node_goes_with_its_supervisor(run: RunDir, spawn: Spawn) -> None:
    gone = [spawn("launch", "local0"), spawn("supervise")]
    stays = spawn("launch", "local1")
    metrics(run, 3)
    done = inject(run, spec("first_node", node="local0", rank=0))
    assert set(done.pids) == {process.pid for process in gone}
    assert [process.wait(10) for process in gone] == [-signal.SIGKILL] * 2
    assert stays.poll() is None


def test_a_signal_ahead_reaches_the_supervisor_alone(
    run: RunDir, spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nor the job of the shell that a local run was started from.
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setattr(subprocess, "run", None)
    supervisor, launcher = spawn("supervise"), spawn("launch", "local0")
    metrics(run, 3)
    assert inject(run, spec("time_limit", node="local0")).pids == (supervisor.pid,)
    assert supervisor.wait(10) == -signal.SIGUSR1
    assert launcher.poll() is None


def test_a_step_that_is_not_reached_is_reported(run: RunDir) -> None:
    def end() -> None:
        path = run.attempt("train", 0).record
        AttemptRecord.load(path).model_copy(update={"ended_at": 1.0}).save(path)

    assert injected(run, spec("worker"), end).missed == "attempt 0 ended before step 3"
    # Without a launcher it is missed too.
    metrics(run, 3)
    assert "no launcher of r runs on local1" in inject(run, spec("node")).missed
