"""`submit`, `status` and `logs` say why a run waits, and refuse what Slurm never starts."""

from pathlib import Path

import pytest
from command_line import call, call_json, fails
from fake_slurm import FakeSlurm
from launch.submit.commands import Inputs, submitted


def test_a_run_that_waits_says_why_and_what_to_do(fake: FakeSlurm, inputs: Inputs) -> None:
    fake.waits = {"1": "PartitionTimeLimit", "2": "Dependency"}
    submitted(inputs, "--name", "r")
    status = call_json("status", "r")
    assert "precompile job waiting for PartitionTimeLimit: its time" in status["reason"]
    assert "`scontrol update JobId=1 TimeLimit=MAXTIME`" in status["reason"]
    job = status["jobs"]["precompile"]
    assert job["meaning"] == "its time limit exceeds the MaxTime of the partition"
    assert "--set slurm.precompile_time=TIME" in job["remedy"]
    assert "waiting for PartitionTimeLimit: its time limit exceeds" in fails(2, "logs", "r")


@pytest.mark.parametrize(
    ("reason", "node", "texts"),
    [
        (
            "Resources",
            "(Code:InsufficientInstanceCapacity)Failure when resuming nodes",
            ["n1, n2 down~: (Code:Insuff", "cloud has no free machines", "--partition NAME"],
        ),
        ("ReqNodeNotAvail, UnavailableNodes:n2", "bad disk", ["; n2 down~: bad disk"]),
    ],
)
def test_the_nodes_reasons_are_shown(
    fake: FakeSlurm, inputs: Inputs, reason: str, node: str, texts: list[str]
) -> None:
    submitted(inputs, "--name", "r")
    fake.states.update(n1="down~", n2="down~")
    fake.reasons = {"n1": node, "n2": node}
    fake.waits = {"1": reason}
    shown = call_json("status", "r")["reason"]
    assert [text for text in texts if text not in shown] == []
    fake.waits = {"1": "Priority"}
    fake.states = dict.fromkeys((f"n{k}" for k in range(9)), "idle") | {"n1": "down~"}
    assert "bad disk" not in call_json("status", "r")["reason"]  # enough others


def test_what_slurm_never_starts_is_refused(fake: FakeSlurm, inputs: Inputs) -> None:
    fake.limits = {"MaxTime": "00:10:00"}
    options = ("submit", "tiny_neox", "--nodes", "4", "--name", "r", *inputs)
    message = fails(2, *options)
    assert "train job: --time 0:30:00: partition main permits 00:10:00 (MaxTime)" in message
    assert "--set slurm.precompile_time=0:30:00: partition main permits 00:10:00" in message
    dry = call(*options, "--dry-run", "--json")
    assert (dry.exit_code, "never start" in dry.stderr) == (2, True)
    assert "train job: --time" in dry.stdout
    message = fails(2, *options, "--time", "9")  # the precompile job alone
    assert "train job" not in message
    assert "precompile job" in message
    assert (fake.jobs, Path("runs/r").exists()) == ({}, False)
    assert call(*options, "--time", "9", "--set", "slurm.precompile_time=9").exit_code == 0
