"""Nodes that respond, are late or differ, and the figure of the all-reduce."""

import subprocess
import sys
from collections.abc import Sequence

import pytest
from launch.diagnose.conftest import Program

from slurmllm.core.config.cluster import HealthChecks
from slurmllm.core.config.resolve import resolve
from slurmllm.core.errors import NodeError
from slurmllm.core.run.records import Finding, NodeHealth
from slurmllm.launch.diagnose.allreduce import pair_rounds
from slurmllm.launch.diagnose.bandwidth import bus_bandwidth, with_bandwidth
from slurmllm.launch.diagnose.probe import (
    LaunchError,
    NodeReport,
    ProbeLine,
    collect,
    compare_nodes,
    unstarted,
)
from slurmllm.launch.supervise.preflight import preflight_ending

WAIT = "import sys, time; sys.stdout.flush(); time.sleep(60)"
REPORT = "from slurmllm.launch.diagnose.probe import report\n"
LATE = (
    "import time\n"
    "from slurmllm.launch.diagnose import ok\n"
    f"{REPORT}"
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
    assert silent.message == "it ended: srun: error: n3: task 2: Exited with exit code 2"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "n2: cluster.setup: line 1 failed with exit code 5: x",
            "cluster.setup: line 1 failed with",
        ),
        (
            "slurmstepd: error: execve(): /x/python: No such file or directory",
            "slurmstepd: error: ",
        ),
        ("slurmllm: line 14: /x/python: No such file or directory", "slurmllm: line 14: /x/pyt"),
        ("/x/python: No module named slurmllm", "/x/python: No module named slurmllm"),
    ],
)
def test_a_node_whose_set_up_or_interpreter_fails_has_answered(line: str, message: str) -> None:
    ended = "srun: error: n2: task 1: Exited with exit code 2"
    script = f"report('n1', took_s=1); print({line!r}); print({ended!r}); exit(1)"
    answers = compare_nodes(collected(f"{REPORT}{script}", 20.0, ("n1", "n2")), HealthChecks())
    assert answers["n1"].of("fail") == ()
    (failed,) = answers["n2"].of("fail")
    assert failed.message.startswith(message)
    ending = preflight_ending(answers, "trn1", "main")
    assert ending is not None
    assert (ending.ending, ending.blamed_nodes) == ("bad_configuration", ())
    assert ending.evidence[0].startswith(f"preflight: n2: {message}")


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
    return NodeReport(versions=versions, checks_s=0.1, clock_ahead_s=ahead_s)


def only(answers: dict[str, NodeHealth], check: str) -> dict[str, Finding]:
    return {
        name: f for name, health in answers.items() for f in health.findings if f.check == check
    }


def test_clocks_are_compared_with_the_median() -> None:
    # The clock of whoever asks is wrong itself, by 60 s.
    delayed = NodeReport(checks_s=0.1)
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
    from slurmllm.launch.diagnose import fail

    finding = fail("shared file system", "x" * 5000, "y" * 50, "→" * 5000)
    line = ProbeLine(node="n" * 60, time=1.0, finding=finding)
    assert len(f"slurmllm-health {line.model_dump_json(exclude_none=True)}\n".encode()) < 1024
    text = f"n3: slurmllm-health {line.model_dump_json(exclude_none=True)}\n"
    assert ProbeLine.parse(text) == line


NAMES = ("n1", "n2", "n3")


class FakeNodes:
    """Nodes of which the first reports bandwidths, or runs nccom-test."""

    job_id: str | None = "7"
    master_addr = "127.0.0.1"

    def __init__(self, names: tuple[str, ...], **gb_s: float) -> None:
        self.nodes, self.gb_s = names, gb_s

    def ask(self, command: Sequence[str]) -> list[subprocess.Popen[bytes]]:
        reports = "; ".join(
            f"report({node.strip('_')!r}, gb_s={gb_s})" for node, gb_s in self.gb_s.items()
        )
        script = f"from slurmllm.launch.diagnose.probe import report; {reports or 'print(12)'}"
        call = command if command[0].endswith("nccom-test") else [sys.executable, "-c", script]
        return [subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)]


def judged(nodes: FakeNodes, *overrides: str, cluster: str = "local") -> list[Finding]:
    config = resolve("tiny_neox", cluster, [f"cluster.health.{o}" for o in overrides])
    health = {name: NodeHealth(node=name) for name in nodes.nodes}
    results = with_bandwidth(health, nodes, config, ("slurmllm",))
    return [finding for record in results.values() for finding in record.findings]


def test_the_slow_nodes_are_named() -> None:
    nodes = FakeNodes(NAMES, __=1.5, _0=9.0, _1=2.0, _2=9.5)
    assert [f.status for f in judged(nodes)] == ["ok"] * 3
    first, two, three = judged(nodes, "min_allreduce_gb_s=5")
    assert (first.status, first.value) == ("ok", 9.0)
    assert two.message == (
        "1.5 GB/s over all nodes; the profile requires 5; "
        "2.00 GB/s with the faster of its neighbours"
    )
    assert three.status == "ok"
    nodes = FakeNodes(NAMES, __=1.5, _0=9.0, _1=9.0, _2=9.5)
    results = judged(nodes, "min_allreduce_gb_s=5")
    assert {f.message for f in results} == {"1.5 GB/s over all nodes; the profile requires 5"}
    assert [f.status for f in results] == ["fail"] * 3
    assert judged(FakeNodes(("n1",))) == []


@pytest.mark.parametrize(("floor", "status"), [((), "warn"), (("min_allreduce_gb_s=5",), "fail")])
def test_no_measurement(floor: tuple[str, ...], status: str) -> None:
    results = judged(FakeNodes(NAMES), *floor)
    assert [f.status for f in results] == [status] * 3
    assert results[0].message.endswith("12")


def test_nccom_test_is_asked_on_neuron_devices(program: Program) -> None:
    table = "size(B) count(elems) type time(us) algbw(GB/s) busbw(GB/s)"
    program(
        "nccom-test",
        f'case "$*" in *"--nworkers 96 --nnodes 3 --slurm-mode --slurm-job-id 7 "*) gb=12;; '
        f'*"--nworkers 32 --minbytes"*) gb=40;; *) exit 1;; esac\n'
        f'echo "{table}"; echo "67108864 33554432 bf16 900 70.0 $gb.5"',
    )
    assert {f.value for f in judged(FakeNodes(NAMES), cluster="trn1")} == {12.5}
    assert [f.value for f in judged(FakeNodes(("n1",)), cluster="trn1")] == [40.5]


@pytest.mark.parametrize("nodes", [3, 4, 33])
def test_every_node_meets_both_neighbours_and_one_at_a_time(nodes: int) -> None:
    rounds = pair_rounds(nodes)
    for pairs in rounds:
        assert len({node for pair in pairs for node in pair}) == 2 * len(pairs)
    results = sorted(pair for pairs in rounds for pair in pairs)
    assert results == [(n, (n + 1) % nodes) for n in range(nodes)]


# Of the user guide of nccom-test (awsdocs-neuron, tools/neuron-sys-tools)
SEVERAL = """
       size(B)    count(elems)    type    time:avg(us)    algbw(GB/s)    busbw(GB/s)    algorithm
             4               1    fp32          299.91           0.00           0.00         mesh
       2097152          524288    fp32          686.32           3.06           5.73          rdh
     536870912       134217728    fp32         9689.51          55.41         103.89    kangaring
Avg bus bandwidth:	16.6181GB/s
"""
FAILED = """
     size(B)    count(elems)    type    time(us)    algbw(GB/s)    busbw(GB/s)
    33554432    Failure running neuron-bench - log file /tmp/nccom_test_log_7pqpdfjf.log
1 errors found - test failed
"""
NO_DRIVER = "Neuron DKMS Driver is not running! Read the troubleshooting guide at: https://…\n"


def test_the_largest_size_counts() -> None:
    assert bus_bandwidth(f"{SEVERAL}[0] NCCL INFO ring of 7\n") == 103.89


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (FAILED, "Failure running neuron-bench - log file /tmp/nccom_test_log_7pqpdfjf.log"),
        (SEVERAL.replace("busbw", "bw"), "4  .* mesh"),
        (NO_DRIVER, "Neuron DKMS Driver is not running"),
        ("", "no output"),
    ],
)
def test_no_measurement_quotes_the_output(text: str, message: str) -> None:
    with pytest.raises(NodeError, match=message):
        bus_bandwidth(text)
