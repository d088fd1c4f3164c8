"""Nodes that respond, that are late, whose clock or versions differ."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest

from slurmllm.config.cluster import HealthChecks
from slurmllm.diagnose.probe import (
    LaunchError,
    NodeReport,
    ProbeLine,
    collect,
    compare_nodes,
    unstarted,
)
from slurmllm.run.records import Finding, NodeHealth

WAIT = "import sys, time; sys.stdout.flush(); time.sleep(60)"
LATE = (
    "import time\n"
    "from slurmllm.diagnose.finding import ok\n"
    "from slurmllm.diagnose.probe import report\n"
    "report('n1', finding=ok('devices', 2))\n"
    "report('n2', version=('torch', '2.9')); report('n2', took_s=1)\n"
    "print('srun: error: n3: task 2: Exited with exit code 2', flush=True)\n"
    "print('slurmllm-health {torn', flush=True)\n"
    "time.sleep(60)\n"
)


def collected(
    script: str, limit_s: float, names: Sequence[str] = ("n1", "n2", "n3")
) -> dict[str, NodeReport]:
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    answers = collect(names, [process], limit_s, lambda: False)
    assert process.poll() is not None
    assert answers is not None
    return answers


def test_a_node_that_does_not_respond_in_time_fails_with_its_last_check(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answers = compare_nodes(collected(LATE, 20.0), HealthChecks(timeout_s=20.0))
    assert "{torn" in capsys.readouterr().err
    assert (
        answers["n1"].findings[-2].message == "no response after the check of devices within 20 s"
    )
    assert answers["n2"].of("fail", "warn") == ()
    assert answers["n2"].checks_s == 1
    (silent,) = answers["n3"].of("fail")
    assert silent.message == "no response: srun: error: n3: task 2: Exited with exit code 2"


def test_a_step_that_did_not_start_fails_by_the_node_that_srun_names() -> None:
    expected = "Task launch for StepId=5.0 failed on node n2: Communication connection failure"
    with pytest.raises(LaunchError, match=expected) as raised:
        collected(f"print('srun: error: {expected}'); exit(1)", 30)
    answers = unstarted(("n1", "n2", "n3"), raised.value.failure)
    assert [name for name, health in answers.items() if health.of("fail")] == ["n2"]
    assert [name for name, health in answers.items() if health.of("warn")] == ["n1", "n3"]
    request = raised.value.failure.model_copy(update={"fault": "request"})
    assert not any(health.of("fail") for health in unstarted(("n1", "n2"), request).values())


@pytest.mark.parametrize(
    ("script", "raised", "message"),
    [
        # Refused at once, and step creation that is retried until the time is over.
        ("print('srun: fatal: --a and --b are mutually exclusive'); exit(1)", "exit code 1", ""),
        ("print('srun: Job 5 step creation temporarily disabled'); {wait}", "disabled", ""),
        ("{wait}", "", "no response within 3 s"),
        ("print('{n1}'); exit(1)", "", ": exit code 1 after "),
    ],
)
def test_a_time_is_claimed_only_if_it_has_passed(script: str, raised: str, message: str) -> None:
    n1 = ProbeLine(node="n1", time=1.0, took_s=0.1)
    text = f"slurmllm-health {n1.model_dump_json(exclude_none=True)}"
    script = script.replace("{n1}", text).replace("{wait}", WAIT)
    if raised:
        with pytest.raises(LaunchError, match=raised) as refused:
            collected(script, 3.0)
        assert refused.value.failure.nodes == ()
        assert "no response" not in str(refused.value)
        return
    answers = compare_nodes(collected(script, 3.0), HealthChecks(timeout_s=3.0))
    assert message in answers["n2"].of("fail")[0].message
    assert ("within" in message) == ("within" in answers["n2"].of("fail")[0].message)


def test_a_stop_breaks_off() -> None:
    process = subprocess.Popen([sys.executable, "-c", WAIT], stdout=subprocess.PIPE)
    assert collect(["n1"], [process], 60, lambda: True) is None
    assert process.poll() is not None


def answer(ahead_s: float, **versions: str) -> NodeReport:
    return NodeReport(NodeHealth(node="n", checks_s=0.1, versions=versions), ahead_s)


def only(answers: dict[str, NodeHealth], check: str) -> dict[str, Finding]:
    return {
        name: f for name, health in answers.items() for f in health.findings if f.check == check
    }


def test_clocks_are_compared_with_the_median() -> None:
    # The clock of whoever asks is wrong itself, by 60 s.
    delayed = NodeReport(NodeHealth(node="n", checks_s=0.1))
    for sent, arrived in ((100.0, 43.0), (101.0, 41.0), (102.0, 44.0)):
        delayed.add(ProbeLine(node="n1", time=sent), arrived)  # the least delayed line counts
    reports = {"n1": delayed, "n2": answer(60.1), "n3": answer(67.0), "n4": answer(59.9)}
    answers = only(compare_nodes(reports, HealthChecks()), "clock")
    assert [name for name, f in answers.items() if f.status == "fail"] == ["n3"]
    assert answers["n3"].message.startswith("the clock differs by +6.95 s from the other nodes")


@pytest.mark.parametrize("status", ["warn", "fail"])
def test_odd_versions(status: str) -> None:
    limits = HealthChecks.model_validate({"unequal_versions": status})
    same = {"torch": "2.9", "driver": "2.24"}
    reports = {"n1": answer(0, **same), "n2": answer(0, torch="2.8"), "n3": answer(0, **same)}
    answers = only(compare_nodes(reports, limits), "versions")
    assert [f.status for f in answers.values()] == ["ok", status, "ok"]
    assert answers["n2"].message == (
        "driver none here, 2.24 on the others, torch 2.8 here, 2.9 on the others"
    )
    del reports["n3"]  # without a majority no version fails
    answers = only(compare_nodes(reports, limits), "versions")
    assert {f.status for f in answers.values()} == {"warn"}
    assert "several on the others" in answers["n1"].message


def test_a_line_is_short_enough_for_slurm() -> None:
    from slurmllm.diagnose.finding import fail

    finding = fail("shared file system", "x" * 5000, "y" * 50, "→" * 5000)
    line = ProbeLine(node="n" * 60, time=1.0, finding=finding)
    assert len(f"slurmllm-health {line.model_dump_json(exclude_none=True)}\n".encode()) < 1024
    text = f"n3: slurmllm-health {line.model_dump_json(exclude_none=True)}\n"
    assert ProbeLine.parse(text) == line
