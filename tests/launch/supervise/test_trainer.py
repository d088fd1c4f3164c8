"""Trainers of other projects under the supervisor, on this machine, with faults."""

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

from slurmllm.launch.supervise.attempts import process_identity
from slurmllm.launch.supervise.worker_output import WorkerOutput, _Stream

TRAINERS = Path(__file__).resolve().parent.parent.parent / "trainers"
STEPS = r"command.progress=step (?P<step>\d+) loss (?P<loss>\S+)"
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


def steps(*more: str, settings: Sequence[str] = WATCHED) -> list[str]:
    script = (str(TRAINERS / "steps.py"), "--out", "{run}/out", "--number", "{attempt}")
    options = ["--nodes=2", "--local", "--name=r", *settings]
    return ["submit", *options, "--", sys.executable, *script, *more]


def losses(bench: Bench) -> dict[int, float]:
    rows = (bench.runs / "r" / "metrics").glob("*.jsonl")
    lines = [json.loads(line) for path in sorted(rows) for line in path.read_text().splitlines()]
    return {row["step"]: row["loss"] for row in lines}


def test_a_killed_worker_and_what_it_lost(bench: Bench) -> None:
    printed = bench.call(*steps("--fault=half", "--at=8", settings=(*WATCHED, "command.steps=24")))
    assert "\ndone early, 20 of 24  slurmllm status r" in printed
    status = bench.status("r")
    assert bench.endings("r") == [("node_failure", "requeue"), ("done", "finish")]
    first, second = status["attempts"]
    assert (first["checkpoint_after"], first["last_step"], first["steps_lost"]) == (5, 7, 2)
    assert (second["checkpoint_before"], second["checkpoint_after"]) == (5, 20)
    assert status["done_early"] == [status["step"], status["steps"]] == [20, 24]
    assert [Path(path).name for path in status["trainer"]["incomplete"]] == ["step-8"]
    assert sorted(losses(bench)) == list(range(1, 21))
    with pytest.raises(ProcessLookupError):  # of its own session
        os.kill(int((bench.runs / "r/out/child").read_text()), 0)
    # It takes up its state: the curve is that of an unbroken run.
    state = 1.0
    for step in range(1, 21):
        state = 0.9 * state + 0.001 * (step % 7)
        assert losses(bench)[step] == pytest.approx(state, abs=1e-6)


def test_a_hang(bench: Bench) -> None:
    bench.call(*steps("--fault=stop", "--rank=1", settings=(*WATCHED, *SHORT_LIMITS)))
    attempts = bench.status("r")["attempts"]
    assert [attempt["class"] for attempt in attempts] == ["hang", "done"], attempts
    assert any("state T (stopped)" in line for line in attempts[0]["evidence"])


def test_a_stop_before_the_end(bench: Bench) -> None:
    settings = (*WATCHED, "command.save_signal=USR1", "command.steps=2000")
    words = ("--steps=2000", "--save-every=1000", "--save-on=USR1")
    process = bench.start(*steps(*words, settings=settings))
    bench.wait_for_step("r", 3)
    bench.until((bench.runs / "r/out/ready-1").exists, "rank 1 has not started")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=400)
    (attempt,) = bench.status("r")["attempts"]
    assert attempt["class"] == "advance_signal"
    assert "asked to save, and left; newest checkpoint: step " in attempt["evidence"][0]
    assert attempt["checkpoint_after"] is not None


def test_a_command_that_does_not_exist(bench: Bench) -> None:
    words = ["submit", "--local", "--name=r", *QUICKLY, "--", "no-such-program", "--x"]
    assert "command not found: no-such-program" in bench.call(*words, code=2)
    assert bench.status("r")["attempts"][0]["class"] == "bad_configuration"


def test_logs_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurmllm.launch.supervise.worker_output.MAX_LOG_BYTES", 1000)
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
