"""`submit --local`: two launchers on this machine, killed, interrupted, resumed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from end_to_end.bench import SLOWLY, SMALL, Bench, processes_with
from rounding import rounding_bound

from slurmllm.checkpoint.formats.weights import open_training
from slurmllm.checkpoint.state import MOMENTS, read_origin
from slurmllm.plan.parameters import parameter_shapes

TRAIN = ("submit", "tiny_neox", "--nodes=2", "--local", "--set=train.compile=false", *SMALL)
REHEARSE = ("submit", "tiny_neox", "--nodes=2", "--local", *SMALL, *SLOWLY)


@pytest.fixture(scope="module")
def unbroken(bench: Bench, inputs: tuple[str, ...]) -> str:
    text = bench.call(*TRAIN, *inputs, "--name=unbroken")
    assert "train attempt 0: done → finish" in text
    assert bench.endings("unbroken") == [("done", "finish")]
    return "unbroken"


def test_the_run_directory_is_complete(bench: Bench, unbroken: str) -> None:
    run = bench.runs / unbroken
    for name in (
        "config.yaml",
        "plan.json",
        "jobs.json",
        "scripts/train.sbatch",
        "scripts/precompile.sbatch",
        "logs/train.log",
        "logs/precompile.log",
        "graphs/manifest.json",
        "graphs/attempts/000/attempt.json",
        "attempts/000/attempt.json",
        "attempts/000/nodes/local1.json",
        "metrics/attempt_000.jsonl",
        "checkpoints/step_00000040/manifest.json",
    ):
        assert (run / name).is_file(), name
    assert list((run / "tensorboard").rglob("*tfevents*"))
    assert bench.status(unbroken)["checkpoints"] == [20, 30, 40]
    hidden = [p for p in run.rglob(".*") if p.name != ".metadata"]  # DCP's index is .metadata
    assert hidden == []


def test_logs_are_shown(bench: Bench, unbroken: str) -> None:
    text = bench.call("logs", unbroken)
    assert text.index("precompile attempt 0") < text.index("step 40/40") < text.rindex("→ finish")
    followed = bench.call("logs", unbroken, "-f")
    assert followed == bench.call("logs", unbroken, "--all-ranks")
    assert [line for line in text.splitlines() if f"[rank 0 local0] {line}" not in followed] == []
    assert bench.call("logs", unbroken, "-n", "1", "--stage=train").count("\n") == 1


def test_a_killed_worker_is_made_good(bench: Bench, inputs: tuple[str, ...], unbroken: str) -> None:
    process = bench.start(*TRAIN, *inputs, "--name=killed")
    bench.wait_for_step("killed", 15)
    os.kill(bench.node("killed", 0, "local1")["pids"]["1"], signal.SIGKILL)
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    assert bench.endings("killed") == [("node_failure", "requeue"), ("done", "finish")]
    first, second = bench.attempt("killed", 0), bench.attempt("killed", 1)
    assert first["blamed_nodes"] == ["local1"]
    assert "SIGKILL" in first["evidence"][0]
    assert (first["first_step"], first["checkpoint_after"]) == (1, 10)
    assert (second["first_step"], second["last_step"]) == (11, 40)
    found = bench.compare_exactly(unbroken, "killed")
    assert found["overlaps"]["b"]["rows"] >= 4
    assert found["overlaps"]["b"]["identical"]


def test_ctrl_c_saves_and_resume_continues(
    bench: Bench, inputs: tuple[str, ...], unbroken: str
) -> None:
    process = bench.start(*TRAIN, *inputs, "--name=stopped")
    bench.wait_for_step("stopped", 13)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 130, output
    assert bench.endings("stopped") == [("advance_signal", "requeue")]
    assert bench.status("stopped")["state"] == "interrupted"
    saved = bench.status("stopped")["checkpoints"][-1]
    assert saved == bench.attempt("stopped", 0)["last_step"] >= 13
    assert not processes_with(str(bench.runs / "stopped"))
    text = bench.call("resume", "stopped")
    assert f"resumed from step {saved}" in text
    assert "precompile attempt" not in text
    assert bench.compare_exactly(unbroken, "stopped")["overlaps"]["b"]["rows"] == 0
    assert "is done: it has trained all its" in bench.call("resume", "stopped", code=2)


def test_a_decay_that_is_set_at_a_resume_has_the_bits_of_a_planned_one(
    bench: Bench, inputs: tuple[str, ...]
) -> None:
    train = (*TRAIN, *inputs, "--nodes=1", "--set=train.z_loss=1e-4")
    decay = ("--set=optim.decay=1-sqrt", "--set=optim.decay_start=25")
    bench.call(*train, *decay, "--set=optim.warmup_steps=4", "--name=planned")
    warmup = ("--set=optim.warmup_steps=0", "--set=optim.warmup_ratio=0.2")
    still = ("--set=train.steps=20", "--set=optim.decay=constant")
    bench.call(*train, *warmup, *still, "--name=open")
    resume = ("resume", "open", "--set=train.steps=40", *decay)
    text = bench.call(*resume, "--set=optim.decay_start=15", code=2)
    assert "optim.decay_start: 15 is before step 20, up to which the run has trained" in text
    assert "resumed from step 20" in bench.call(*resume)
    bench.compare_exactly("planned", "open")
    rows = (bench.runs / "open/metrics/attempt_001.jsonl").read_text().splitlines()
    rates = {row["step"]: row["lr"] for row in map(json.loads, rows)}
    assert rates[21] == rates[25] > rates[26] > rates[40]
    model = read_origin(bench.runs / "open/checkpoints/step_00000040").model
    planned, opened = (
        open_training(bench.runs / name / "checkpoints/step_00000040", model)
        for name in ("planned", "open")
    )
    for name in parameter_shapes(model):
        assert torch.equal(planned.read(name), opened.read(name)), name
        for kind in MOMENTS:
            assert torch.equal(planned.read_moment(kind, name), opened.read_moment(kind, name))


def test_a_supervisor_killed_outright_leaves_nothing_running(
    bench: Bench, inputs: tuple[str, ...], unbroken: str
) -> None:
    process = bench.start(*TRAIN, *inputs, "--name=orphaned")
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
    bench.compare_exactly(unbroken, "orphaned")


def test_a_fault_of_the_user_stops_with_one_message(
    bench: Bench, inputs: tuple[str, ...], tmp_path: Path
) -> None:
    corpus = Path(inputs[0].partition("=")[2].partition("=")[2])
    moved = tmp_path / "c.arrow"
    moved.write_bytes(corpus.read_bytes())
    manifest = corpus.with_name(f"{corpus.name}.json")
    manifest_copy = tmp_path / "c.arrow.json"
    manifest_copy.write_bytes(manifest.read_bytes())
    process = bench.start(*REHEARSE, inputs[1], f"--set=data.corpus={moved}", "--name=gone")
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
    bench: Bench, inputs: tuple[str, ...]
) -> None:
    lines = '--set=cluster.setup=["cd /", "module load nosuch"]'
    text = bench.call(*REHEARSE, *inputs, "--name=unset", lines, code=2)
    message = "cluster.setup: line 2 failed with exit code 127: module load nosuch"
    status = bench.status("unset")
    assert (status["state"], "bad_configuration" in str(status)) == ("stopped", True)
    assert message in text
    assert message in bench.call("logs", "unset")
    assert message in bench.call("status", "unset")
    assert not (bench.runs / "unset" / "graphs" / "attempts" / "001").exists()
    bench.call("resume", "unset", '--set=cluster.setup=["export GREETING=hello"]')
    assert bench.endings("unset")[-1] == ("done", "finish")


@pytest.mark.numerics
def test_validation_while_training_has_the_numbers_of_evaluate(
    bench: Bench, inputs: tuple[str, ...]
) -> None:
    corpus = next(one for one in inputs if "data.corpus=" in one).partition("data.corpus=")[2]
    texts = ("--set=data.validation=0.1", f"--set=eval.corpora={{seen: {corpus}}}")
    often = ("--set=eval.every_steps=20", "--set=eval.sequences=8")
    done = bench.call(*TRAIN, *inputs, *texts, *often, "--name=validated")
    assert "eval.corpora.seen: " in done, "a warning: it is the training text"
    found = bench.status("validated")["evaluation"]
    assert (found["step"], sorted(found["texts"])) == (40, ["held_out", "seen"])
    evaluated = bench.call(
        "evaluate", "validated", "--task=validation", "--limit=8", "--json", "--no-plot"
    )
    rows = json.loads(evaluated[evaluated.index("{") :])["suites"][0]["rows"]
    loss = next(row for row in rows if row["metric"] == "loss")["scores"]["40"]
    # The sum over the targets of 8 sequences, in other batches.
    assert found["texts"]["held_out"]["loss"] == pytest.approx(loss, rel=rounding_bound(8 * 128))
