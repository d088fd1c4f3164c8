"""What is collected of an attempt that has ended, on the fake Slurm."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_slurm import FakeSlurm
from supervise.starts import attempt_record, start_of

from slurmllm.run.records import HangRecord, NodeRecord
from slurmllm.run.rundir import RunDir
from slurmllm.supervise import evidence as evidences
from slurmllm.supervise.attempt_monitor import Observations
from slurmllm.supervise.classify import Evidence
from slurmllm.supervise.evidence import gather_evidence

HANG = HangRecord(found_at=0.0, phase="stepping", step=7, waited_s=90.0, limit_s=60.0)


@pytest.fixture
def ended(tmp_path: Path) -> tuple[RunDir, FakeSlurm]:
    """A job of two nodes: n1's worker was killed, n2 reports nothing."""
    run, cluster = RunDir(tmp_path / "r"), FakeSlurm(("n1", "n2"))
    cluster.start(cluster.submit("#!/bin/bash\n#SBATCH --nodes=2\n"))
    paths = run.attempt("train", 0)
    NodeRecord(node="n1", pids={0: 5}, exit_codes={0: -9}).save(paths.node("n1"))
    run.logs.mkdir()
    run.stage_log("train").write_text("of precompile\ntrain attempt 0: begun\nKilled\n")
    return run, cluster


def gather(
    ended: tuple[RunDir, FakeSlurm], stop_signal: str | None = None, hang: HangRecord | None = None
) -> Evidence:
    run, cluster = ended
    allocation = start_of(cluster, "1", ("n1", "n2"))
    return gather_evidence(
        run, attempt_record(job_id="1"), allocation, Observations(hang=hang), stop_signal
    )


def test_what_slurm_and_the_nodes_report(ended: tuple[RunDir, FakeSlurm]) -> None:
    _, cluster = ended
    evidence = gather(ended)
    assert (evidence.slurm_state, evidence.step_out_of_memory) == ("RUNNING", False)
    assert (list(evidence.nodes), evidence.unreported, evidence.down_nodes) == (["n1"], ["n2"], [])
    assert evidence.log_tails == {0: ["train attempt 0: begun", "Killed"]}
    assert (evidence.unwritable, evidence.uncompiled) == (None, ())
    cluster.states["n2"] = "down*"
    cluster.finish("1", "OUT_OF_MEMORY")
    evidence = gather(ended)
    assert (evidence.down_nodes, evidence.step_out_of_memory) == (["n2"], True)


def test_after_sigterm_accounting_is_waited_for(
    ended: tuple[RunDir, FakeSlurm], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda _: ended[1].finish("1", "TIMEOUT"))
    monkeypatch.setattr(evidences, "time", clock)
    assert gather(ended, "SIGUSR1").slurm_state == "RUNNING"
    assert gather(ended, "SIGTERM").slurm_state == "TIMEOUT"


def test_a_launcher_that_could_not_end_its_workers_hung(ended: tuple[RunDir, FakeSlurm]) -> None:
    hang = gather(ended, hang=HANG).hang
    assert hang is not None
    assert hang.suspects == hang.unresponsive_nodes == ("n2",)
