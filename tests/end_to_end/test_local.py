"""`submit --local`: two launchers on this machine, killed, interrupted, resumed."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from end_to_end.bench import LEAN, REHEARSED, SMALL, Bench, processes_with
from rounding import rounding_bound

SUBMIT = ("submit", "tiny_neox", "--nodes=2", "--local", *SMALL)


@pytest.fixture(scope="module")
def train(inputs: tuple[str, ...], stdlib: tuple[Path, Path]) -> tuple[str, ...]:
    """The command of a run by torch, which is validated while it trains."""
    texts = ("--set=data.validation=0.1", f"--set=eval.corpora={{seen: {stdlib[0]}}}")
    often = ("--set=eval.every_steps=20", "--set=eval.sequences=8")
    return (*SUBMIT, "--set=train.compile=false", *inputs, *texts, *often)


@pytest.fixture(scope="module")
def rehearse(inputs: tuple[str, ...]) -> tuple[str, ...]:
    """The command of a run whose training is not the matter."""
    return (*SUBMIT, *LEAN, *REHEARSED, *inputs)


@pytest.fixture(scope="module")
def killed(bench: Bench, train: tuple[str, ...]) -> str:
    process = bench.start(*train, "--name=killed")
    bench.wait_for_step("killed", 15)
    os.kill(bench.node("killed", 0, "local1")["pids"]["1"], signal.SIGKILL)
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    assert "eval.corpora.seen: " in output, "a warning: it is the training text"
    assert "train attempt 1: done → finish" in output
    return "killed"


def test_the_run_directory_is_complete(bench: Bench, killed: str) -> None:
    run = bench.runs / killed
    for name in (
        "config.yaml",
        "plan.json",
        "jobs.json",
        "scripts/train.sbatch",
        "logs/train.log",
        "attempts/000/attempt.json",
        "attempts/000/nodes/local1.json",
        "metrics/attempt_000.jsonl",
        "checkpoints/step_00000040/manifest.json",
    ):
        assert (run / name).is_file(), name
    assert list((run / "tensorboard").rglob("*tfevents*"))
    assert bench.status(killed)["checkpoints"] == [20, 30, 40]
    hidden = [p for p in run.rglob(".*") if p.name != ".metadata"]  # DCP's index is .metadata
    assert hidden == []


def test_both_stages_are_shown(bench: Bench, rehearsed: str) -> None:
    for name in ("scripts/precompile.sbatch", "graphs/manifest.json", "graphs/graphs.tar"):
        assert (bench.runs / rehearsed / name).is_file(), name
    text = bench.call("logs", rehearsed)
    assert text.index("precompile attempt 0") < text.index("step 40/40") < text.rindex("→ finish")
    followed = bench.call("logs", rehearsed, "-f")
    assert followed == bench.call("logs", rehearsed, "--all-ranks")
    assert [line for line in text.splitlines() if f"[rank 0 local0] {line}" not in followed] == []
    assert bench.call("logs", rehearsed, "-n", "1", "--stage=train").count("\n") == 1


def test_a_killed_worker_is_made_good(bench: Bench, killed: str) -> None:
    """Steps made twice have the same bits; tests/train has the unbroken run to compare with."""
    assert bench.endings("killed") == [("node_failure", "requeue"), ("done", "finish")]
    first, second = bench.attempt("killed", 0), bench.attempt("killed", 1)
    assert first["blamed_nodes"] == ["local1"]
    assert "SIGKILL" in first["evidence"][0]
    assert (first["first_step"], first["checkpoint_after"]) == (1, 10)
    assert (second["first_step"], second["last_step"]) == (11, 40)
    result = bench.compare_exactly(killed, killed)
    assert result["overlaps"]["b"]["rows"] >= 4
    assert result["overlaps"]["b"]["identical"]


def test_ctrl_c_saves_and_resume_continues(
    bench: Bench, rehearse: tuple[str, ...], rehearsed: str
) -> None:
    process = bench.start(*rehearse, "--nodes=1", "--name=stopped")
    bench.wait_for_step("stopped", 13)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 130, output
    assert "interrupted  slurmllm resume stopped continues from its checkpoint" in output
    assert bench.endings("stopped") == [("advance_signal", "requeue")]
    assert bench.status("stopped")["state"] == "interrupted"
    saved = bench.status("stopped")["checkpoints"][-1]
    assert saved == bench.attempt("stopped", 0)["last_step"] >= 13
    assert not processes_with(str(bench.runs / "stopped"))
    text = bench.call("resume", "stopped")
    assert f"resumed from step {saved}" in text
    assert "precompile attempt" not in text
    assert bench.compare_exactly(rehearsed, "stopped")["overlaps"]["b"]["rows"] == 0
    assert "is done: it has trained all its" in bench.call("resume", "stopped", code=2)


@pytest.mark.long  # tests/train/test_checkpoint_hook.py has the rules; the tests above resume
def test_a_decay_that_is_set_at_a_resume_has_the_bits_of_a_planned_one(
    bench: Bench, rehearse: tuple[str, ...]
) -> None:
    train = (*rehearse, "--nodes=1", "--set=env.SLURMLLM_REHEARSAL_STEP_S=0.02")
    decay = ("--set=optim.decay=1-sqrt", "--set=optim.decay_start=25")
    bench.call(*train, *decay, "--set=optim.warmup_steps=4", "--name=planned")
    warmup = ("--set=optim.warmup_steps=0", "--set=optim.warmup_ratio=0.2")
    still = ("--set=train.steps=20", "--set=optim.decay=constant")
    bench.call(*train, *warmup, *still, "--name=open")
    resume = ("resume", "open", "--set=train.steps=40", *decay)
    text = bench.call(*resume, "--set=optim.decay_start=15", code=2)
    assert "optim.decay_start: 15 is before step 20, up to which the run has trained" in text
    assert "resumed from step 20" in bench.call(*resume)
    bench.compare_exactly("planned", "open")  # a step mixes its learning rate into the state
    rows = (bench.runs / "open/metrics/attempt_001.jsonl").read_text().splitlines()
    rates = {row["step"]: row["lr"] for row in map(json.loads, rows)}
    assert rates[21] == rates[25] > rates[26] > rates[40]
    last = "checkpoints/step_00000040/state_00000_of_00001.npy"
    planned, opened = ((bench.runs / name / last).read_bytes() for name in ("planned", "open"))
    assert planned == opened


def test_a_supervisor_killed_outright_leaves_nothing_running(
    bench: Bench, rehearse: tuple[str, ...], rehearsed: str
) -> None:
    process = bench.start(*rehearse, "--nodes=1", "--name=orphaned")
    bench.wait_for_step("orphaned", 12)
    run = str(bench.runs / "orphaned")
    supervisors = [
        pid
        for pid in processes_with(run)
        if b"supervise" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    for pid in (*supervisors, process.pid):
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=400)
    bench.until(lambda: not processes_with(run), "workers outlived their supervisor", 20)
    assert bench.status("orphaned")["state"] == "interrupted"
    bench.call("resume", "orphaned")
    assert bench.endings("orphaned") == [("node_failure", "requeue"), ("done", "finish")]
    assert "without a record" in bench.attempt("orphaned", 0)["evidence"][0]
    bench.compare_exactly(rehearsed, "orphaned")


def test_a_fault_of_the_user_stops_with_one_message(
    bench: Bench, rehearse: tuple[str, ...], stdlib: tuple[Path, Path], tmp_path: Path
) -> None:
    corpus, moved = stdlib[0], tmp_path / "c.arrow"
    shutil.copyfile(corpus, moved)
    shutil.copyfile(f"{corpus}.json", f"{moved}.json")
    process = bench.start(*rehearse, "--nodes=1", f"--set=data.corpus={moved}", "--name=gone")
    bench.wait_for_step("gone", 12)
    moved.unlink()
    os.kill(bench.node("gone", 0, "local0")["pids"]["0"], signal.SIGKILL)
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 2, output
    assert bench.endings("gone")[-1] == ("bad_configuration", "stop")
    assert str(moved) in bench.attempt("gone", 1)["evidence"][0]
    assert "Traceback" not in output.rpartition("train attempt 1")[2]
    assert bench.status("gone")["checkpoints"][-1] == 10


def test_a_setup_line_that_fails_ends_the_run_with_its_number(
    bench: Bench, rehearse: tuple[str, ...]
) -> None:
    lines = '--set=cluster.setup=["cd /", "module load nosuch"]'
    text = bench.call(*rehearse, "--nodes=1", "--name=unset", lines, code=2)
    message = "cluster.setup: line 2 failed with exit code 127: module load nosuch"
    status = bench.status("unset")
    assert (status["state"], "bad_configuration" in str(status)) == ("stopped", True)
    assert message in text
    assert message in bench.call("logs", "unset")
    assert message in bench.call("status", "unset")
    assert not (bench.runs / "unset" / "attempts" / "001").exists()


@pytest.mark.numerics
def test_validation_while_training_has_the_numbers_of_evaluate(bench: Bench, killed: str) -> None:
    result = bench.status(killed)["evaluation"]
    assert (result["step"], sorted(result["texts"])) == (40, ["held_out", "seen"])
    evaluated = bench.call(
        "evaluate", killed, "--task=validation", "--limit=8", "--json", "--no-plot"
    )
    rows = json.loads(evaluated[evaluated.index("{") :])["suites"][0]["rows"]
    loss = next(row for row in rows if row["metric"] == "loss")["scores"]["40"]
    # The sum over the targets of 8 sequences, in other batches.
    assert result["texts"]["held_out"]["loss"] == pytest.approx(loss, rel=rounding_bound(8 * 128))
