"""A request is compared with its partition before sbatch gets it."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from fake_slurm import FakeSlurm

from slurmllm.core.config.resolve import resolve
from slurmllm.core.run.rundir import RunDir
from slurmllm.core.slurm import client
from slurmllm.core.slurm.limits import (
    check_limits,
    describe_difference,
    read_options,
    suitable_nodes,
)
from slurmllm.core.slurm.site import Site
from slurmllm.launch.submit.render import check_jobs

# As 22.05.8 and 24.11.5 print it: the later one has more fields, and others between them.
OLD = (
    "PartitionName=main AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=YES "
    "QoS=N/A DefaultTime=00:05:00 DisableRootJobs=NO ExclusiveUser=NO GraceTime=20 Hidden=NO "
    "MaxNodes=4 MaxTime=1-00:00:00 MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED Nodes=n[1-4] "
    "PriorityJobFactor=1 PriorityTier=1 RootOnly=NO ReqResv=NO OverSubscribe=NO OverTimeLimit=NONE "
    "PreemptMode=REQUEUE State=UP TotalCPUs=14 TotalNodes=4 SelectTypeParameters=NONE "
    "JobDefaults=(null) DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED TRES=cpu=14,mem=84315M\n"
)
NEW = OLD.replace("ExclusiveUser=NO ", "ExclusiveUser=NO ExclusiveTopo=NO ").replace(
    "MaxCPUsPerNode=UNLIMITED ", "MaxCPUsPerNode=UNLIMITED MaxCPUsPerSocket=UNLIMITED "
)


@pytest.mark.parametrize("text", [OLD, NEW, OLD + NEW.replace("=main", "=gpu")])
def test_what_scontrol_prints_is_read(text: str) -> None:
    with mock.patch.object(client, "_run", return_value=text):
        partitions = client.SlurmClient().partitions()
    main = partitions["main"]
    shown = [main[name] for name in ("MaxTime", "DefaultTime", "MaxNodes", "MinNodes", "State")]
    assert shown == ["1-00:00:00", "00:05:00", "4", "0", "UP"]
    assert main["TRES"] == "cpu=14,mem=84315M"
    assert len(partitions) == text.count("\n")


def test_what_sinfo_prints_is_read() -> None:
    text = (
        "main*|up|n1|idle|4|24105|(null)|(null)|none\n"
        "gpu|up|n2|down~|96|1152000|gpu:a100:8(S:0-1)|a100,efa|"
        "(Code:InsufficientInstanceCapacity)Failure when resuming nodes [root@2026-11-26]\n"
    )
    with mock.patch.object(client, "_run", return_value=text):
        first, second = client.SlurmClient().partition_nodes()
    assert (first.memory_mb, first.in_service) == (24105, True)
    assert (first.features, first.reason) == ("", "")
    assert (second.memory_mb, second.features, second.in_service) == (1152000, "a100,efa", False)
    assert second.reason.startswith("(Code:InsufficientInstanceCapacity)")


def check(slurm: FakeSlurm, **options: str) -> Any:
    return check_limits(
        {name.replace("_", "-"): value for name, value in options.items()}, Site(slurm)
    )


@pytest.mark.parametrize(
    ("limits", "options", "text"),
    [
        ({"MaxTime": "04:00:00"}, {"time": "240"}, None),
        ({"MaxTime": "04:00:00", "DefaultTime": "00:05:00"}, {"time": "3:59:00"}, None),
        ({"MaxTime": "04:00:00"}, {"time": "241"}, "--time 241: partition main permits 04:00:00 "),
        ({"MaxTime": "04:00:00"}, {"time": "241"}, "(MaxTime); choose --time 04:00:00 or less"),
        ({"MaxTime": "1-00:00:00"}, {"time": "1-00:00:01"}, "permits 1-00:00:00"),
        ({"MaxTime": "04:00:00"}, {"time": "5:00:00", "time_min": "1:00:00"}, None),
        ({"MaxTime": "UNLIMITED", "MaxNodes": "UNLIMITED"}, {"time": "9-0", "nodes": "4"}, None),
        ({"MaxNodes": "2"}, {"nodes": "3"}, "--nodes 3: partition main permits 2 (MaxNodes)"),
        ({"MaxNodes": "2"}, {"nodes": "2-4"}, None),
        ({"MinNodes": "2"}, {"nodes": "1"}, "--nodes 1: partition main requires 2 (MinNodes)"),
        ({"MaxMemPerNode": "8000"}, {"mem": "8G"}, "--mem 8G: partition main permits 8000M"),
        ({"ReqResv": "YES"}, {}, "takes only jobs with a --reservation"),
        ({"ReqResv": "YES"}, {"reservation": "r"}, None),
        ({"AllowQos": "a,b"}, {"qos": "c"}, "--qos c: partition main permits a,b (AllowQos)"),
        ({"AllowQos": "Long,b"}, {"qos": "LONG"}, None),
        ({"MaxTime": "1"}, {"time": "9", "time_min": "UNLIMITED"}, None),  # Slurm reads it
        ({"State": "DRAIN"}, {}, "partition main is DRAIN"),
        ({}, {"nodes": "5"}, "--nodes 5: needs 5 nodes; partition main has 4 suitable"),
        ({}, {"nodes": "4", "mem": "8000"}, None),
        ({}, {"mem": "0"}, None),
        ({}, {"nodes": "4", "mem": "12G"}, "choose at most 8000 MB, which all 4 have"),
        ({}, {"mem": "12T"}, "choose at most 16000 MB, which 3 of its nodes have"),
        ({}, {"exclude": "n4", "gres": "gpu:9"}, "choose at most 2, which 1 of its nodes have"),
        ({}, {"nodes": "4", "mem": "8000000K"}, None),
        ({}, {"mem": "1T"}, "--mem 1T: needs 1 node; partition main has 0 suitable"),
        ({}, {"cpus_per_task": "5"}, "--cpus-per-task 5: needs 1 node; partition main has 0"),
        ({}, {"gres": "gpu:2"}, None),
        ({}, {"gres": "gpu:a100:3"}, "choose at most 2, which 1 of its nodes have"),
        ({}, {"nodes": "2", "gpus_per_node": "a100:1"}, "--gpus-per-node a100:1: needs 2 nodes;"),
        ({}, {"constraint": "fast"}, None),
        ({}, {"constraint": "fast&old"}, "choose of fast"),
        ({}, {"constraint": "fast|old"}, None),
        (
            {},
            {"nodes": "4", "exclude": "n[1-2]"},
            "--exclude n[1-2]: needs 4 nodes; partition main has 2 suitable",
        ),
        ({}, {"nodes": "2", "exclude": "n[1-2]"}, None),
        ({}, {"nodelist": "n9"}, "--nodelist n9: needs 1 node; partition main has 0 suitable"),
        ({}, {"exclude": "n4", "gres": "gpu:1"}, "has 1 suitable, 0 with all options together"),
        ({"MaxTime": "1"}, {"time": "2", "partition": "hidden"}, None),
        ({"MaxTime": "1"}, {"time": "2", "clusters": "other"}, None),
    ],
)
def test_a_request_that_can_never_start_is_a_fault(
    limits: dict[str, str], options: dict[str, str], text: str | None
) -> None:
    slurm = FakeSlurm()
    slurm.limits = limits
    slurm.unequal = {"n1": {"memory_mb": 8000}, "n4": {"gres": "gpu:a100:2", "features": "fast"}}
    faults = list(check(slurm, **options).faults)
    if text is None:
        assert faults == []
    else:
        assert len(faults) == 1
        assert text in faults[0]
        assert faults[0].endswith("another --partition")


def test_the_gpus_of_the_profile_are_compared_where_slurm_counts_them(tmp_path: Path) -> None:
    config = resolve("tiny_neox", "p4d", ["slurm.partition=main", "cluster.directives=[]"])
    slurm = FakeSlurm()
    run = RunDir(tmp_path)
    assert check_jobs(slurm, config, run, 2, compiles=False)[1]["train"] == []  # no GRES at all
    slurm.unequal = {name: {"gres": "gpu:a100:4"} for name in ("n1", "n2", "n3")}
    assert check_jobs(slurm, config, run, 2, compiles=True)[1]["train"] == [
        "train job: cluster.devices_per_node 8: needs 2 nodes; partition main has 0 suitable; "
        "nodes there have at most 4 GPUs; choose another --cluster, or use another --partition"
    ]
    slurm.unequal = {name: {"gres": "gpu:a100:8"} for name in ("n1", "n2")}
    assert check_jobs(slurm, config, run, 2, compiles=False)[1]["train"] == []
    slurm.config = None  # slurmctld does not answer: sbatch says so
    assert check_jobs(slurm, config, run, 2, compiles=False)[1]["train"] == []


def test_a_qos_may_permit_more_than_the_partition() -> None:
    slurm = FakeSlurm()
    slurm.limits, slurm.flags = {"MaxTime": "60"}, {"normal": "", "long": "PartitionTimeLimit"}
    for qos in ({}, {"qos": "long"}):
        assert check(slurm, time="90", **qos).faults == []
        assert "unless the job's QOS is long" in check(slurm, time="90", **qos).warnings[0]
    assert check(slurm, time="90", qos="normal").faults


def test_what_merely_waits_is_a_warning() -> None:
    slurm = FakeSlurm()
    assert check(slurm, nodes="4") == ([], [])
    slurm.states.update(n1="down*", n2="idle~", n3="allocated")
    (text,) = check(slurm, nodes="4").warnings
    assert "3 of 4 nodes are in service (n1 down*); the job waits for them" in text
    assert check(slurm, nodes="3") == ([], [])
    slurm.limits = {"State": "DOWN"}
    assert "partition main is DOWN" in check(slurm, nodes="1").warnings[0]
    slurm.config = None  # slurmctld does not answer: sbatch says so
    assert check(slurm, nodes="99") == ((), ())
    # A partition whose nodes are hidden is not judged by them.
    slurm = FakeSlurm()
    slurm.limits = {"TotalNodes": "64"}  # without PrivateData=cloud, sinfo shows those that are up
    assert check(slurm, nodes="9", mem="1T") == ([], [])
    slurm.limits = {"TotalNodes": "4"}
    assert check(slurm, nodes="9").faults


def test_one_of_several_partitions_is_enough() -> None:
    slurm = FakeSlurm()
    slurm.limits = {"MaxTime": "60"}
    short = slurm.partitions()["main"]
    both = {"main": short, "long": {**short, "PartitionName": "long", "MaxTime": "UNLIMITED"}}
    nodes = [*slurm.partition_nodes()]
    slurm.partition = "long"
    nodes += slurm.partition_nodes()
    slurm.partitions, slurm.partition_nodes = lambda: both, lambda: nodes  # type: ignore[method-assign]
    assert check(slurm, time="90", partition="main,long").faults == []
    assert check(slurm, time="90", partition="main").faults


@pytest.mark.parametrize(
    ("unequal", "text"),
    [
        ({}, ""),
        ({"n4": {"cpus": 2}}, "nodes differ: 3 × 4 CPUs, 1 × 2 CPUs (n4)"),
        ({"n2": {"memory_mb": 15900}}, ""),  # the firmware's part
        ({"n2": {"memory_mb": 8000}}, "nodes differ: 3 × 16 GiB, 1 × 8 GiB (n2)"),
        ({"n1": {"gres": "gpu:8"}}, "nodes differ: 3 × 0 GPUs, 1 × 8 GPUs (n1)"),
        (
            {"n3": {"cpus": 2, "memory_mb": 8000}, "n4": {"cpus": 2}},
            "nodes differ: 2 × 4 CPUs and 16 GiB, 1 × 2 CPUs and 8 GiB (n3), "
            "1 × 2 CPUs and 16 GiB (n4)",
        ),
    ],
)
def test_unequal_nodes_are_one_line(unequal: dict[str, Any], text: str) -> None:
    slurm = FakeSlurm()
    slurm.unequal = unequal
    assert describe_difference(slurm.partition_nodes()) == text
    warnings = check(slurm, nodes="4").warnings
    assert [line.partition(";")[0] for line in warnings] == ([text] if text else [])
    assert check(slurm, nodes="1").warnings == []
    assert check(slurm, nodes="1-4").warnings == warnings


def test_options_are_read_from_directives() -> None:
    lines = ["#SBATCH --nodes=2-4", '#SBATCH --comment="a \\"b\\""', "#SBATCH --hold"]
    assert read_options(lines) == {"nodes": "2-4", "comment": 'a "b"', "hold": ""}


def test_the_nodes_that_suit_all_options() -> None:
    slurm = FakeSlurm()
    slurm.gres = "gpu:8"
    slurm.unequal = {"n1": {"gres": "gpu:4"}, "n2": {"cpus": 2}}
    nodes = slurm.partition_nodes()
    options = {"gpus-per-node": "8", "mincpus": "4"}
    assert [node.name for node in suitable_nodes(options, nodes, slurm)] == ["n3", "n4"]
    assert suitable_nodes({}, nodes, slurm) == nodes


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"gres": "gpu:8"}, "no node of main has GPUs: leave it out"),
        ({"gpus_per_node": "a100:1"}, "no node of main has GPUs: leave it out"),
        ({"constraint": "a100"}, "no node of main has features: leave it out"),
        ({"mem": "900G"}, "choose at most 16000 MB, which all 4 have"),
    ],
)
def test_what_no_node_has_is_not_offered(options: dict[str, str], text: str) -> None:
    (fault,) = check(FakeSlurm(), **options).faults
    assert f"; {text}, or use another --partition" in fault
