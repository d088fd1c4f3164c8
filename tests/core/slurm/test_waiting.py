"""Slurm's reasons why a job is pending: each has a row, and each row's commands exist."""

import re
from pathlib import Path

import click
import pytest

from slurmllm.cli.main import cli
from slurmllm.core.slurm.error_texts import explain_waiting as explain
from slurmllm.core.slurm.error_texts import waiting_reasons as table

LINES = Path(__file__).with_name("waiting_reasons.txt").read_text().splitlines()
REASONS = [line for line in LINES if not line.startswith("#")]


def test_every_reason_has_a_row_and_every_row_a_reason() -> None:
    assert len(REASONS) > 220
    assert [reason for reason in REASONS if not explain(reason, "7", "r")[0]] == []
    matched = {explain(reason, "7", "r")[0] for reason in REASONS}
    assert [row for row in table() if row["meaning"] not in matched] == []
    assert explain("NoSuchReason", "7", "r") == ("", "`scontrol show job 7` shows more")


@pytest.mark.parametrize(
    ("reason", "meaning", "command"),
    [
        (
            "PartitionTimeLimit",
            "exceeds the MaxTime",
            "`scontrol update JobId=7 TimeLimit=MAXTIME`",
        ),
        ("PartitionTimeLimit", "", "`slurmllm resume r --set slurm.precompile_time=TIME`"),
        ("BadConstraints", "exclusions", "`scontrol update JobId=7 ExcNodeList=`"),
        ("ReqNodeNotAvail, UnavailableNodes:n1", "down, drained", "`sinfo --list-reasons`"),
        ("ReqNodeNotAvail,_Reserved_for_maintenance", "maintenance", "TimeLimit=MINUTES"),
        ("AssocGrpNodeLimit", "together", "flags=assoc,qos"),
        ("AssocGrpCPUMinutesLimit", "budget", "--account NAME"),
        ("QOSMaxJobsPerUserLimit", "as many jobs", "`squeue --me`"),
        ("JobHeldUser", "user holds", "`scontrol release 7`"),
        ("launch_failed_requeued_held", "holds it", "`scontrol release 7`"),
        ("DependencyNeverSatisfied", "did not end as required", "`slurmllm cancel r`"),
    ],
)
def test_rows(reason: str, meaning: str, command: str) -> None:
    shown = explain(reason, "7", "r", "precompile" if "precompile" in command else "train")
    assert meaning in shown[0]
    assert command in shown[1]


def test_the_commands_of_slurmllm_have_these_options() -> None:
    remedies = [explain(reason, "7", "r")[1] for reason in REASONS]
    commands = {text for remedy in remedies for text in re.findall(r"`slurmllm ([^`]+)`", remedy)}
    assert len(commands) > 5
    for command in commands:
        verb, run, *rest = command.split()
        verb_command = cli.get_command(click.Context(cli), verb)
        assert verb_command is not None, command
        options = {name for param in verb_command.params for name in param.opts}
        assert (run, {name for name in rest if name.startswith("--")} - options) == ("r", set())
