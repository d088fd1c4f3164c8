"""New workers in the same job: which nodes they get, and what becomes of the old ones."""

import subprocess
import time
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm
from launch.supervise.starts import attempt_record, start_of
from made_records import make_run, save_submission

from slurmllm.core.run.records import AttemptRecord, NodeRecord
from slurmllm.launch.graphs.archive import pack_archive
from slurmllm.launch.supervise import attempts
from slurmllm.launch.supervise.attempt_monitor import Observations
from slurmllm.launch.supervise.classify import Ending
from slurmllm.launch.supervise.supervisor import Supervisor
from slurmllm.plan.mesh import load_mesh, make_mesh, save_mesh
from slurmllm.train.backends.environment import BROADCAST

NODES = tuple(f"n{number}" for number in range(1, 6))  # four of the mesh, and a spare one


def supervisor(tmp_path: Path, *overrides: str) -> Supervisor:
    run = make_run(tmp_path / "r", "slurm.spare_nodes=1", *overrides)
    cluster = FakeSlurm(NODES)
    cluster.start(cluster.submit("#!/bin/bash\n#SBATCH --nodes=5\n"))
    save_submission(run, nodes=4, train_job="1")
    return Supervisor(run, "train", start_of(cluster, "1", NODES))


def record(made: Supervisor, number: int) -> AttemptRecord:
    nodes = made.allocation.nodes
    fields = {"attempt": number, "job_id": "1", "nodes": nodes, "world_size": 4}
    opened = attempt_record(**fields, started_at=time.time())
    opened.save(made.run.attempt("train", number).record)
    return opened


def close(
    made: Supervisor, number: int, *blamed: str, text: str = "{} failed its checks"
) -> AttemptRecord:
    """An attempt that ended because of some nodes, whose launchers never reported."""
    cluster = getattr(made.allocation, "client", None)
    assert isinstance(cluster, FakeSlurm)
    if "SIGKILL" not in text:
        cluster.states.update(dict.fromkeys(blamed, "down*"))
    evidence = tuple(text.format(node) for node in blamed) or ("rank 1 was ended by SIGKILL",)
    ending = Ending("node_failure", evidence, blamed)
    closed = made._close(record(made, number), ending, {}, Observations())
    if closed.action == "restart":
        made._restart(closed)
    return closed


def alive(made: Supervisor, number: int, node: str) -> None:
    """The node's launcher has reported how its workers ended."""
    NodeRecord.model_validate({"node": node, "pids": {1: 7}, "exit_codes": {1: -9}}).save(
        made.run.attempt("train", number).node(node)
    )


def test_spare_nodes_replace_lost_ones_until_none_is_left(tmp_path: Path) -> None:
    made = supervisor(tmp_path, "slurm.no_progress_limit=9")
    assert made.allocation.nodes == NODES[:4]  # the spare one waits
    assert close(made, 0, "n2").action == "restart"
    assert made.allocation.nodes == ("n1", "n3", "n4", "n5")
    # The job holds four nodes; a requeue asks for five.
    opened = attempts.open_attempt(made.run, "train", made.config, made.allocation)
    assert opened.spare_nodes == 0
    closed = close(made, opened.attempt, "n3")
    assert (closed.action, closed.backoff_s) == ("requeue", 60.0)


def test_the_next_attempt_of_the_job_has_the_other_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, attempts_nodes = supervisor(tmp_path), list[tuple[str, ...]]()
    endings = [
        Ending("node_failure", ("rank 1 on n2: nrt_execute status=1201",), ("n2",)),
        Ending("done", ("4 workers finished",)),
    ]

    def run_attempt() -> tuple[AttemptRecord, None]:
        number = len(attempts_nodes)
        attempts_nodes.append(made.allocation.nodes)
        return made._close(record(made, number), endings[number], {}, Observations()), None

    monkeypatch.setattr(made, "_attempt", run_attempt)
    monkeypatch.setattr(made.stop, "install", lambda: None)
    assert made.main() == 0
    assert attempts_nodes == [NODES[:4], ("n1", "n3", "n4", "n5")]


def test_a_crash_keeps_its_node_and_a_second_one_does_not(tmp_path: Path) -> None:
    made = supervisor(tmp_path, "slurm.no_progress_limit=9")
    for number in (0, 1):
        for node in NODES:
            alive(made, number, node)
    text = "rank 1 on {} was ended by SIGKILL"
    assert close(made, 0, "n2", text=text).action == "restart"
    assert made.allocation.nodes == NODES[:4]
    # Blamed twice, and nothing was gained: other nodes, by the queue.
    assert close(made, 1, "n2", text=text).action == "requeue"
    assert made._preparation.failed_nodes == {"n2"}


@pytest.mark.parametrize(
    ("overrides", "stop", "blamed"),
    [
        (["slurm.restart_in_allocation=false"], None, ()),
        ([], "SIGUSR1", ()),  # the time limit comes
        ([], None, ("n1",)),  # the first node has the supervisor
    ],
)
def test_no_restart(
    tmp_path: Path, overrides: list[str], stop: str | None, blamed: tuple[str, ...]
) -> None:
    made = supervisor(tmp_path, *overrides)
    made.stop.name = stop
    assert close(made, 0, *blamed).action == "requeue"


def test_the_mesh_follows_the_nodes_that_the_job_got(tmp_path: Path) -> None:
    made = supervisor(tmp_path, "slurm.min_nodes=2")
    save_mesh(make_mesh(made.config, 4), made.run.plan)
    made._fit_mesh(2)
    assert load_mesh(made.run.plan).nodes == 2


def test_graphs_are_sent_once_before_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archives: list[Path] = []
    made = supervisor(tmp_path, f"cluster.node_local={tmp_path / 'disk'}")
    preparation = made._preparation

    def send(graph: str) -> dict[str, str]:
        path = tmp_path / "cache" / "inductor/fxgraph/aa" / graph / "x"
        path.parent.mkdir(parents=True)
        path.write_text(graph)
        pack_archive(tmp_path / "cache", made.run, "native", 1.0, versions={})
        return preparation._broadcast_graphs(lambda: False)

    monkeypatch.setattr(made.allocation, "broadcast", lambda path, *_: archives.append(path))
    assert Path(send("a")[BROADCAST]).is_relative_to(tmp_path / "disk")
    assert preparation._broadcast_graphs(lambda: False) == {}  # all nodes have them
    assert close(made, 0, "n2").action == "restart"
    assert send("b") == {BROADCAST: ""}  # sbcast would wait for n2
    assert len(archives) == 1


def test_srun_names_the_nodes_once_some_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: commands.append(command))
    allocation = start_of(FakeSlurm(NODES), "1", NODES)
    allocation.launch(tmp_path, "train", 0)
    allocation.restart(("n1", "n3", "n4", "n5"), 0.0)
    allocation.launch(tmp_path, "train", 1)
    first, second = commands
    assert not any(part.startswith("--nodelist") for part in first)
    assert "--overlap" not in first
    assert "--nodelist=n1,n3,n4,n5" in second
    assert {"--nodes=4", "--ntasks=4", "--overlap"} <= set(second)
