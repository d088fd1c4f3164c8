"""The all-reduce's figure: the finding of each node, and which program measures.

Samples of nccom-test's output are of its user guide (awsdocs-neuron, tools/neuron-sys-tools).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest

from diagnose.conftest import Program
from slurmllm.config.resolve import resolve
from slurmllm.diagnose.allreduce import pair_rounds
from slurmllm.diagnose.bandwidth import bus_bandwidth, with_bandwidth
from slurmllm.errors import NodeError
from slurmllm.run.records import Finding, NodeHealth

NAMES = ("n1", "n2", "n3")


class FakeNodes:
    """Nodes of which the first reports bandwidths, or runs nccom-test."""

    master_addr = "127.0.0.1"

    def __init__(self, names: tuple[str, ...], **gb_s: float) -> None:
        self.nodes, self.gb_s = names, gb_s

    def ask(self, command: Sequence[str]) -> list[subprocess.Popen[bytes]]:
        reports = "; ".join(
            f"report({node.strip('_')!r}, gb_s={gb_s})" for node, gb_s in self.gb_s.items()
        )
        script = f"from slurmllm.diagnose.probe import report; {reports or 'print(12)'}"
        call = command if command[0].endswith("nccom-test") else [sys.executable, "-c", script]
        return [subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)]


def judged(nodes: FakeNodes, *overrides: str, cluster: str = "local") -> list[Finding]:
    config = resolve("tiny_neox", cluster, [f"cluster.health.{o}" for o in overrides])
    health = {name: NodeHealth(node=name) for name in nodes.nodes}
    results = with_bandwidth(health, nodes, "7", config, ("slurmllm",), 1)
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


ONE = """
    size(B)    count(elems)     type    time(us)    algbw(GB/s)    busbw(GB/s)
   33554432        33554432    uint8         768          40.69          40.69
Avg bus bandwidth:      40.6901GB/s
"""
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


@pytest.mark.parametrize(("text", "gb_s"), [(ONE, 40.69), (SEVERAL, 103.89)])
def test_the_largest_size_counts(text: str, gb_s: float) -> None:
    assert bus_bandwidth(text) == gb_s


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (FAILED, "Failure running neuron-bench - log file /tmp/nccom_test_log_7pqpdfjf.log"),
        (NO_DRIVER, "Neuron DKMS Driver is not running"),
        ("", "no output"),
    ],
)
def test_no_measurement_quotes_the_output(text: str, message: str) -> None:
    with pytest.raises(NodeError, match=message):
        bus_bandwidth(text)
