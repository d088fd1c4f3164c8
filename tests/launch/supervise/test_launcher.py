"""A node's launcher in the precompile stage: what it removes, and for whom it waits how long."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from made_records import save_attempt

from slurmllm.core.config.resolve import resolve
from slurmllm.core.errors import NodeError
from slurmllm.core.run import host_memory
from slurmllm.core.run.records import NodeRecord
from slurmllm.core.run.rundir import RunDir
from slurmllm.launch.submit.prepare import render_run, write_run
from slurmllm.launch.supervise import launcher as launchers
from slurmllm.launch.supervise import workers
from slurmllm.launch.supervise.launcher import STOPPED_GRACE_S, Launcher
from slurmllm.train.backends.environment import make_cache_folder

NODES = ("n0", "n1")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "runs" / "r")
    run.path.mkdir(parents=True)
    disk = f"cluster.node_local={tmp_path / 'disk'}"
    write_run(render_run(resolve("tiny_neox", "local", [disk]), 2, run))
    save_attempt(run, stage="precompile", nodes=NODES, job_id="7", master_addr="127.0.0.1")
    return run


def launcher(run: RunDir, node_rank: int, monkeypatch: pytest.MonkeyPatch) -> Launcher:
    monkeypatch.setenv("SLURMLLM_NODE", NODES[node_rank])
    monkeypatch.setenv("SLURM_NODEID", str(node_rank))
    launcher = Launcher(run, "precompile", 0)
    launcher.cache = make_cache_folder(launcher.config, run)
    return launcher


def test_the_first_node_removes_what_an_earlier_attempt_submitted(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted = run.graphs_of_node("n1")
    submitted.parent.mkdir(exist_ok=True)
    for node_rank in (1, 0):  # the other node may have submitted in this attempt
        submitted.touch()
        launcher(run, node_rank, monkeypatch)._empty_cache()
        assert submitted.exists() is (node_rank == 1)


def test_a_node_that_submits_nothing_more_is_not_waited_for(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, clock = launcher(run, 0, monkeypatch), [50.0]
    monkeypatch.setattr(launchers, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    assert not first._has_failed("n1")  # it has not begun
    first.stop_requested = True
    assert not first._has_failed("n1")
    clock[0] += STOPPED_GRACE_S - 1.0
    assert not first._has_failed("n1")
    clock[0] += 2.0
    assert first._has_failed("n1")
    second, path = launcher(run, 0, monkeypatch), run.attempt("precompile", 0).node("n1")
    path.parent.mkdir()
    path.write_text("{")  # another node's record may be seen in part
    assert not second._has_failed("n1")
    for exit_code, failed in ((0, False), (70, True)):
        record = NodeRecord(node="n1", pids={1: 5}, exit_codes={1: exit_code})
        record.save(path)
        assert second._has_failed("n1") is failed


def test_workers_are_ended_before_their_relay(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    first, order = launcher(run, 0, monkeypatch), list[str]()
    monkeypatch.setattr(first, "start", lambda: None)
    monkeypatch.setattr(first, "end", lambda: order.append("workers"))
    monkeypatch.setattr(first, "relay", SimpleNamespace(close=lambda: order.append("relay")))

    def refuse() -> None:
        raise NodeError("no space")

    with pytest.raises(NodeError):
        first.run_to_end(refuse)
    assert order == ["workers", "relay"]


def test_the_time_of_the_first_step_is_logged(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock, first = [50.0], launcher(run, 0, monkeypatch)
    monkeypatch.setattr(workers, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    caplog.set_level("INFO")
    for clock[0] in (50.0, 51.0, 80.0, 85.0, 110.0):
        first.log_compiling()
    begin = "compiling the first step …"
    assert caplog.messages == [begin, f"{begin}, 0:00:30 so far", f"{begin}, 0:01:00 so far"]


@pytest.mark.parametrize("file", ["job/memory.events", "memory/job/memory.oom_control", "vmstat"])
def test_the_kernels_kills_during_an_attempt_are_recorded(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: str
) -> None:
    group = "4:memory:/job\n" if "oom_control" in file else "0::/job\n"
    (tmp_path / "cgroup").write_text(group)
    monkeypatch.setattr(host_memory, "_OWN_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(host_memory, "_CGROUPS", tmp_path)
    monkeypatch.setattr(host_memory, "_VMSTAT", tmp_path / "vmstat")
    (tmp_path / "vmstat").write_text("oom_kill 100\n")  # of the machine
    (counts := tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    counts.write_text("oom 9\noom_kill 4\n")
    first = launcher(run, 0, monkeypatch)
    counts.write_text("oom 9\noom_kill 6\n")
    first.save_with_retries()
    assert NodeRecord.load(run.attempt("precompile", 0).node("n0")).oom_kills == 2
