"""What is collected of an attempt that has ended, on the fake Slurm."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_slurm import FakeSlurm
from launch.supervise.starts import attempt_record, start_of

from slurmllm.core.config.command import CommandConfig
from slurmllm.core.run.records import HangRecord, NodeRecord
from slurmllm.core.run.rundir import RunDir
from slurmllm.launch.supervise import evidence as evidences
from slurmllm.launch.supervise.attempt_monitor import Observations
from slurmllm.launch.supervise.classify import Evidence
from slurmllm.launch.supervise.evidence import gather_evidence

HANG = HangRecord(found_at=0.0, phase="stepping", step=7, waited_s=90.0, limit_s=60.0)


Ended = tuple[RunDir, FakeSlurm]


@pytest.fixture
def ended(tmp_path: Path) -> Ended:
    """A job of two nodes: n1's worker was killed, n2 reports nothing."""
    run, cluster = RunDir(tmp_path / "r"), FakeSlurm(("n1", "n2"))
    cluster.start(cluster.submit("#!/bin/bash\n#SBATCH --nodes=2\n"))
    paths = run.attempt("train", 0)
    NodeRecord(node="n1", pids={0: 5}, exit_codes={0: -9}).save(paths.node("n1"))
    run.logs.mkdir()
    run.stage_log("train").write_text("of precompile\ntrain attempt 0: begun\nKilled\n")
    return run, cluster


def gather(
    ended: Ended,
    stop_signal: str | None = None,
    hang: HangRecord | None = None,
    command: CommandConfig | None = None,
) -> Evidence:
    run, cluster = ended
    allocation, observed = start_of(cluster, "1", ("n1", "n2")), Observations(hang=hang)
    record = attempt_record(job_id="1")
    return gather_evidence(run, record, allocation, observed, stop_signal, command=command)


def test_what_slurm_and_the_nodes_report(ended: Ended) -> None:
    _, cluster = ended
    evidence = gather(ended)
    assert (evidence.slurm_state, evidence.step_out_of_memory) == ("RUNNING", False)
    assert (list(evidence.nodes), evidence.unreported, evidence.down_nodes) == (["n1"], ["n2"], [])
    assert evidence.log_tails == {0: ["train attempt 0: begun", "Killed"]}
    assert (evidence.unwritable, evidence.uncompiled) == (None, ())
    del cluster.states["n2"]  # sinfo does not list it, which is no evidence
    assert gather(ended).down_nodes == []
    cluster.states["n2"] = "down*"
    cluster.finish("1", "OUT_OF_MEMORY")
    evidence = gather(ended)
    assert (evidence.down_nodes, evidence.step_out_of_memory) == (["n2"], True)


def test_after_sigterm_accounting_is_waited_for(
    ended: Ended, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda _: ended[1].finish("1", "TIMEOUT"))
    monkeypatch.setattr(evidences, "time", clock)
    assert gather(ended, "SIGUSR1").slurm_state == "RUNNING"
    assert gather(ended, "SIGTERM").slurm_state == "TIMEOUT"


def test_a_launcher_that_could_not_end_its_workers_hung(ended: Ended) -> None:
    hang = gather(ended, hang=HANG).hang
    assert hang is not None
    assert hang.suspects == hang.unresponsive_nodes == ("n2",)


def test_without_suspects_the_node_whose_stack_differs_is_one(ended: Ended) -> None:
    paths = ended[0].attempt("train", 0)
    NodeRecord(node="n2", pids={1: 6}, exit_codes={1: -9}).save(paths.node("n2"))
    paths.stacks(0).parent.mkdir()
    frame = 'Current thread 0x2 (most recent call first):\n  File "/x/{}.py", line 7 in f\n'
    paths.stacks(0).write_text(frame.format("torch/distributed"))
    paths.stacks(1).write_text(frame.format("slurmllm/data/stream"))
    evidence = gather(ended, hang=HANG)
    assert evidence.stacks == ("rank 1: f (data/stream.py:7)",)
    assert evidence.hang is not None
    assert (evidence.hang.suspects, evidence.hang.unresponsive_nodes) == (("n2",), ())


def test_what_a_trainer_of_another_project_has_left(ended: Ended) -> None:
    command = CommandConfig(run="x", steps=20)
    without = gather(ended, command=command)
    assert without.leaving == (
        "ended without saving, as command.save_signal is none; no complete checkpoint is known"
    )
    assert without.unfinished == ""
    metrics = ended[0].metrics(0)
    metrics.parent.mkdir()
    for step, unfinished in ((7, True), (20, False)):
        metrics.write_text(f'{{"step": {step}, "loss": 1.0}}\n')
        text = f"the last step that was read is {step} of 20 (command.steps)"
        assert gather(ended, command=command).unfinished == (text if unfinished else "")
    path = ended[0].path / "out/step-5/done"
    path.parent.mkdir(parents=True)
    path.touch()
    fields = {"checkpoints": "{run}/out/step-{step}", "completion_file": "done"}
    saving = CommandConfig(run="x", save_signal="USR1", **fields)
    assert gather(ended, command=saving).leaving == (
        "asked to save, and left; newest checkpoint: step 5"
    )
