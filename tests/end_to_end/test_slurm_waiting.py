"""On a real Slurm: unequal nodes, and jobs that wait: the reason, and that its command works."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from end_to_end.bench import REHEARSED, SMALL, Bench
from end_to_end.slurm_runs import Cluster, wait

pytestmark = pytest.mark.slurm
LATE = "late"  # a partition of this file


def scontrol(*arguments: str) -> str:
    return subprocess.run(["scontrol", *arguments], capture_output=True, text=True).stdout


@pytest.fixture
def _unequal(
    _cluster: Any, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    cluster = type(_cluster)(tmp_path_factory.mktemp("unequal") / "state")
    cluster.call("up", "--nodes=4", "--cpus=4,4,4,2")
    monkeypatch.setenv("SLURM_CONF", cluster.slurm_conf)
    yield
    cluster.call("down")


@pytest.mark.usefixtures("_unequal")
def test_a_run_uses_all_cpus_of_unequal_nodes(inputs: tuple[str, ...], tmp_path: Path) -> None:
    bench = Bench(tmp_path / "runs")
    line = "nodes differ: 3 × 4 CPUs, 1 × 2 CPUs (n4)"
    arguments = ("submit", "tiny_neox", "--nodes=4", "--name=r", *SMALL, *REHEARSED, *inputs)
    assert f"warning: {line};" in " ".join(bench.call(*arguments).split())
    wait(bench, "r", "done")
    assert bench.endings("r") == [("done", "finish")]
    job = bench.status("r")["jobs"]["train"]["job_id"]
    columns = ["--noheader", "--parsable2", "--format=JobName,AllocCPUS,NNodes,State"]
    rows = subprocess.check_output(["sacct", f"--jobs={job}", *columns], text=True).split()
    assert "slurmllm-launch|14|4|COMPLETED" in rows
    checks = {row["name"]: row for row in json.loads(bench.look("doctor", "--json"))["checks"]}
    assert (checks["equal nodes"]["state"], checks["equal nodes"]["found"]) == ("warn", line)


@pytest.fixture
def _late_partition(slurm: Cluster) -> Iterator[None]:
    scontrol("create", f"PartitionName={LATE}", "Nodes=n[1-5]", "MaxTime=60", "State=UP")
    yield
    scontrol("update", "NodeName=n5", "State=RESUME")
    scontrol("delete", f"PartitionName={LATE}")


def _shorten() -> None:
    scontrol("update", f"PartitionName={LATE}", "MaxTime=10")


def _drain() -> None:
    scontrol("update", "NodeName=n5", "State=DRAIN", "Reason=disk is bad")


@pytest.mark.usefixtures("_late_partition")
@pytest.mark.parametrize(
    ("name", "options", "change", "reason", "text", "command"),
    [
        ("held", ["hold=true"], None, "JobHeldUser", "the user holds it", "scontrol release"),
        ("begin", ["begin=now+1hour"], None, "BeginTime", "delayed", "StartTime=now"),
        ("time", [], _shorten, "PartitionTimeLimit", "MaxTime", "TimeLimit=10"),
        ("node", ["nodelist=n5"], _drain, "ReqNodeNotAvail", "drained: disk is bad", ""),
        ("bad", [], "ExcNodeList=n[1-5]", "BadConstraints", "exclusions", "ExcNodeList="),
    ],
)
def test_a_wait_is_explained_and_its_command_ends_it(
    name: str,
    options: list[str],
    change: Callable[[], None] | str | None,
    reason: str,
    text: str,
    command: str,
    bench: Bench,
    inputs: tuple[str, ...],
) -> None:
    hold = [] if name in ("held", "begin") else ["hold=true"]
    arguments = ["submit", "tiny_neox", "--nodes=1", f"--name=wait-{name}", *SMALL, *REHEARSED]
    arguments += [*inputs, f"--partition={LATE}", "--precompile=always"]
    arguments += [f"--set=slurm.directives.precompile.{text}" for text in (*options, *hold)]
    shown = bench.call(*arguments)
    job = re.search(r"precompile job (\d+)", shown)
    assert job is not None
    if hold:
        if callable(change):
            change()
        elif change:
            scontrol("update", f"JobId={job[1]}", change)
        scontrol("release", job[1])

    def waiting() -> bool:
        return bool(bench.status(f"wait-{name}")["jobs"]["precompile"]["reason"].startswith(reason))

    bench.until(waiting, f"never {reason}", 30, every_s=0.5)
    status = bench.status(f"wait-{name}")
    shown_job = status["jobs"]["precompile"]
    assert status["state"] == "queued"
    assert text in status["reason"]
    assert shown_job["meaning"] in status["reason"]
    assert shown_job["remedy"] in status["reason"]
    if command:
        remedies = [
            c.replace("MAXTIME", "10") for c in re.findall("`([^`]+)`", shown_job["remedy"])
        ]
        remedy = next(line for line in remedies if command in line)
        subprocess.run(shlex.split(remedy), check=True)
    else:
        scontrol("update", "NodeName=n5", "State=RESUME")
    bench.until(lambda: not waiting(), f"{reason} has not ended", 30, every_s=0.5)
    bench.look("cancel", f"wait-{name}")


@pytest.mark.usefixtures("_late_partition")
def test_a_request_that_slurm_never_starts_is_refused(
    bench: Bench, inputs: tuple[str, ...]
) -> None:
    _shorten()
    call = ("submit", "tiny_neox", "--nodes=1", "--name=never", *SMALL, *inputs)
    call = (*call, f"--partition={LATE}", "--time=0:30:00")
    message = bench.call(*call, code=2)
    assert "--time 0:30:00: partition late permits 00:10:00 (MaxTime)" in message
    assert bench.call(*call, "--dry-run", code=2).count("late permits 00:10:00") > 1
    assert not (bench.runs / "never").exists()
    assert "needs 8 nodes; partition late has 5 suitable" in bench.call(
        *call[:2], "--nodes=8", *call[3:-1], "--set=train.micro_batch=1", "--time=9", code=2
    )
