"""Trainers of other projects under the supervisor, on this machine, with faults."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from end_to_end.bench import Bench

from slurmllm.supervise.attempts import process_identity
from slurmllm.supervise.worker_output import WorkerOutput, _Stream

TRAINERS = Path(__file__).resolve().parent.parent / "trainers"
STEPS = r"command.progress=step (?P<step>\d+) loss (?P<loss>\S+)"
LONG = pytest.mark.long  # their classes: test_trainer_command.py
SHORT_LIMITS = ("watchdog.min_step_s=5", "watchdog.step_factor=2", "watchdog.save_s=5")
QUICKLY = ("slurm.backoff_s=0", "cluster.health.enabled=false")
WATCHED = (
    *("command.checkpoints={run}/out/step-{step}", "command.completion_file=done", STEPS),
    *("command.steps=20", *QUICKLY),
)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench(tmp_path / "runs") as bench:
        yield bench


def arguments(*words: str, settings: Sequence[str] = WATCHED, nodes: int = 2) -> list[str]:
    options = [f"--nodes={nodes}", "--local", "--name=r", *settings]
    return ["submit", *options, "--", sys.executable, *words]


def steps(*more: str, settings: Sequence[str] = WATCHED) -> list[str]:
    script = (str(TRAINERS / "steps.py"), "--out", "{run}/out", "--number", "{attempt}")
    return arguments(*script, *more, settings=settings)


def losses(bench: Bench) -> dict[int, float]:
    rows = (bench.runs / "r" / "metrics").glob("*.jsonl")
    lines = [json.loads(line) for path in sorted(rows) for line in path.read_text().splitlines()]
    return {row["step"]: row["loss"] for row in lines}


def test_a_killed_worker_and_what_it_lost(bench: Bench) -> None:
    bench.call(*steps("--fault=half", "--at=8"))
    status = bench.status("r")
    assert [(a["class"], a["action"]) for a in status["attempts"]] == [
        ("node_failure", "requeue"),
        ("done", "finish"),
    ]
    first, second = status["attempts"]
    assert (first["checkpoint_after"], first["last_step"], first["steps_lost"]) == (5, 7, 2)
    assert (second["checkpoint_before"], second["checkpoint_after"]) == (5, 20)
    assert status["step"] == status["steps"] == 20
    assert [Path(path).name for path in status["trainer"]["incomplete"]] == ["step-8"]
    assert sorted(losses(bench)) == list(range(1, 21))
    with pytest.raises(ProcessLookupError):  # of its own session
        os.kill(int((bench.runs / "r/out/child").read_text()), 0)
    # It takes up its state: the curve is that of an unbroken run.
    state = 1.0
    for step in range(1, 21):
        state = 0.9 * state + 0.001 * (step % 7)
        assert losses(bench)[step] == pytest.approx(state, abs=1e-6)


@pytest.mark.parametrize(
    ("fault", "rank", "code", "ending", "text"),
    [
        ("raise", 1, 70, "code_error", "rank 1 on local1: ValueError: the answer is not 42"),
        pytest.param("memory", 0, 72, "out_of_memory", "CUDA out of memory", marks=LONG),
        pytest.param("exit", 0, 70, "code_error", "exit code 3: its last line: ", marks=LONG),
    ],
)
def test_endings_that_stop(
    bench: Bench, fault: str, rank: int, code: int, ending: str, text: str
) -> None:
    settings = (*WATCHED, "slurm.restart=none")
    bench.call(*steps(f"--fault={fault}", f"--rank={rank}", settings=settings), code=code)
    (attempt,) = bench.status("r")["attempts"]
    assert attempt["class"] == ending
    assert any(text in line for line in attempt["evidence"])
    assert attempt["blamed_nodes"] == []


def test_a_hang(bench: Bench) -> None:
    bench.call(*steps("--fault=stop", "--rank=1", settings=(*WATCHED, *SHORT_LIMITS)))
    attempts = bench.status("r")["attempts"]
    assert [attempt["class"] for attempt in attempts] == ["hang", "done"], attempts
    assert any("state T (stopped)" in line for line in attempts[0]["evidence"])


@pytest.mark.parametrize(
    ("save", "text", "checkpoint"),
    [
        ("USR1", "asked to save, and left; newest checkpoint: step ", True),
        pytest.param(
            "none", "ended without saving, as command.save_signal is none; ", False, marks=LONG
        ),
    ],
)
def test_a_stop_before_the_end(bench: Bench, save: str, text: str, checkpoint: bool) -> None:
    more = ("--save-on=USR1",) if save == "USR1" else ()
    settings = (*WATCHED, f"command.save_signal={save}", "command.steps=2000")
    process = bench.start(*steps("--steps=2000", "--save-every=1000", *more, settings=settings))
    bench.wait_for_step("r", 3)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=400)
    (attempt,) = bench.status("r")["attempts"]
    assert attempt["class"] == "advance_signal"
    assert text in attempt["evidence"][0]
    assert (attempt["checkpoint_after"] is not None) == checkpoint


def test_a_command_that_does_not_exist(bench: Bench) -> None:
    words = ["submit", "--local", "--name=r", *QUICKLY, "--", "no-such-program", "--x"]
    output = bench.call(*words, code=2)
    assert "command not found: no-such-program" in output
    assert bench.status("r")["attempts"][0]["class"] == "bad_configuration"


LOGS = {
    "torchtitan": "step: {step}  loss: {loss:.5f}  grad_norm: 1.0  memory: 1.0GiB(1%)  tps: 100",
    "Megatron-LM": " iteration {step:8d}/    1000 | consumed samples: 10 | elapsed time per "
    "iteration (ms): 900.0 | learning rate: 1.0E-04 | global batch size: 8 | lm loss: {loss:.6E} "
    "| loss scale: 1.0 | grad norm: 1.0 | number of skipped iterations: 0 | number of nan "
    "iterations: 0 |",
}


@pytest.mark.parametrize(
    ("name", "then", "ending"),
    [
        ("torchtitan", "KILL", "node_failure"),
        pytest.param("torchtitan", "STOP", "hang", marks=LONG),
        pytest.param("Megatron-LM", "KILL", "node_failure", marks=LONG),
    ],
)
def test_a_replayed_log_drives_progress_endings_and_hangs(
    bench: Bench, tmp_path: Path, name: str, then: str, ending: str
) -> None:
    log = tmp_path / "a.log"
    lines = [LOGS[name].format(step=step, loss=8 / step) for step in range(1, 41)]
    log.write_text("".join(f"noise\n[rank0]:{line}\n" for line in lines))
    words = (str(TRAINERS / "replay.py"), str(log), "--attempt", "{attempt}")
    limits = SHORT_LIMITS if then == "STOP" else ()
    settings = (f"command.progress={name}", "command.steps=40", *QUICKLY, *limits)
    bench.call(*arguments(*words, "--lines=50", f"--then={then}", settings=settings, nodes=1))
    status = bench.status("r")
    assert [a["class"] for a in status["attempts"]] == [ending, "done"]
    assert status["attempts"][0]["last_step"] == 25
    assert losses(bench) == pytest.approx({step: 8 / step for step in range(1, 41)}, rel=1e-4)


def test_logs_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurmllm.supervise.worker_output.MOST_BYTES", 1000)
    log = tmp_path / "log"
    output = WorkerOutput(0)
    write = output.open(0, os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND))
    output.start()
    program = "for i in range(9999): print('line', i)\nprint('the end')"
    subprocess.run([sys.executable, "-c", program], stdout=write, check=True)
    os.close(write)
    deadline = time.monotonic() + 20
    while not output.lines(0) or output.lines(0)[-1].text != "the end":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    taken = output.take()
    output.close()
    assert taken.endswith(b"the end\n")
    assert taken.count(b"\n") == 10_000
    text = log.read_bytes()
    assert text.startswith(b"line 0\n")
    assert b" bytes left out]\n" in text
    assert text.endswith(b"the end\n")
    assert len(text) < 1000 + (65 << 10)


def test_a_progress_bar_is_in_the_log_now_and_then(tmp_path: Path) -> None:
    log = tmp_path / "log"
    stream = _Stream(os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND), 0)
    for percent in range(100):
        stream.add(b"\r%3d%%|#" % percent)
    stream.add(b"\nthe end\n\r 1%")
    stream.close()
    assert log.read_bytes() == b"\r  0%|#\r 99%|#\nthe end\n\r 1%\n"


def test_what_a_killed_launcher_has_started_is_ended(bench: Bench) -> None:
    text = "if [ $RANK = 1 ]; then sleep 2; exit 3; fi; sleep 600 & echo $! > {run}/child; wait"
    settings = ("--nodes=2", "--local", "--name=r", *QUICKLY, "slurm.restart=none")
    bench.call("submit", *settings, "--", text, code=70)
    assert process_identity(int((bench.runs / "r/child").read_text())) is None
