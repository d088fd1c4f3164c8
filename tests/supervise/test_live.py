"""`status --watch` and `logs -f` during a real run of two workers, one of which is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from end_to_end.bench import LEAN, SMALL, Bench

# How long after an attempt's end its record may follow, on a busy machine
RECORDED_WITHIN_S = 5.0


def start(bench: Bench, inputs: tuple[str, ...], *more: str) -> subprocess.Popen[str]:
    return bench.start(
        "submit",
        "tiny_neox",
        "--nodes=2",
        "--local",
        *SMALL,
        *LEAN,
        *inputs,
        "--name=r",
        *more,
    )


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench(tmp_path / "runs") as bench:
        yield bench


def test_a_run_is_followed_through_a_failure_to_its_end(
    bench: Bench, inputs: tuple[str, ...]
) -> None:
    price = "--set=cluster.price={on_demand: 3600.0, date: '2026-01-01'}"
    process = start(bench, inputs, price)
    bench.wait_for_step("r", 12)
    watching = bench.start("status", "--watch", "0.5", "r", "--json")
    following = bench.start("logs", "r", "-f", "--all-ranks", "--stage=train")
    failures = bench.start("logs", "r", "-f", "--failed")
    bench.wait_for_step("r", 23)
    os.kill(bench.node("r", 0, "local1")["pids"]["1"], signal.SIGKILL)
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    looks = [json.loads(line) for line in watching.communicate(timeout=400)[0].splitlines()]
    assert watching.returncode == 0
    first, last = looks[0], looks[-1]
    assert (first["state"], last["state"], last["restarts"]) == ("training", "done", 1)
    assert last["step"] == last["last_checkpoint"]["step"] == 40
    # An attempt counts up to now until its end is recorded, a moment after it: the next look may
    # find less, by that moment.
    node_s = [3600 * look["node_hours"] for look in looks]
    assert node_s[-1] > max(node_s) - 2 * RECORDED_WITHIN_S
    assert all(after > before - 2 * RECORDED_WITHIN_S for before, after in pairwise(node_s))
    taken_s = sum(a["ended_at"] - a["started_at"] for a in last["attempts"])
    assert last["usd"] == pytest.approx(2 * taken_s, rel=0.2)  # two nodes, a dollar a second
    lines = following.communicate(timeout=400)[0].splitlines()
    assert following.returncode == 0
    assert lines.index("── train attempt 0") < lines.index("── train attempt 1")
    assert any(line.startswith("[rank 0 local0] ") and "step 40/40" in line for line in lines)
    output, _ = failures.communicate(timeout=400)
    assert failures.returncode == 0
    assert "first failing worker: rank 1 on local1\n  ended by SIGKILL\n" in output


def test_a_local_run_is_cancelled_and_resumed(bench: Bench, inputs: tuple[str, ...]) -> None:
    # Slow steps: the run must not end before `cancel` has started on a busy machine.
    process = start(bench, inputs, "--set=env.SLURMLLM_REHEARSAL_STEP_S=0.6")
    bench.wait_for_step("r", 3)
    assert "to save and exit" in bench.call("cancel", "r")
    assert re.search("to save and exit before|nothing to cancel", bench.call("cancel", "r"))
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 130, output
    found = bench.status("r")
    assert (found["state"], found["reason"]) == ("cancelled", "`slurmllm resume r` continues")
    assert bench.endings("r") == [("cancelled", "stop")]
    assert found["last_checkpoint"]["step"] == found["step"] >= 3
    assert "nothing to cancel" in bench.call("cancel", "r")
    (row,) = json.loads(bench.call("report", "r", "--no-files", "--json"))["runs"]
    assert row["state"] == "cancelled"
    bench.call("resume", "r")
    assert bench.status("r")["state"] == "done"
