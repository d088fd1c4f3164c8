"""Compare a job's request with its partition's limits and nodes, before sbatch gets it.

By default Slurm accepts a job beyond the limits of its partition (EnforcePartLimits), and the job
is pending for ever. Limits of accounts and QOS are not compared: waiting_reasons.yaml has them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from slurmllm.core.config.rules import minutes_of
from slurmllm.core.errors import SlurmError
from slurmllm.core.format import format_names, format_plural
from slurmllm.core.slurm.client import PartitionNode, SlurmClient, count_gpus
from slurmllm.core.slurm.site import Partition, Site

Nodes = Sequence[PartitionNode]
Options = Mapping[str, str]  # sbatch's, by long name, and fields of the profile
EQUAL_NODES = "each step may take as long as on the slowest; --constraint or --exclude: equal ones"
_MB = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2}
DEVICES = "cluster.devices_per_node"
_AMOUNTS: dict[str, Callable[[PartitionNode], int]] = {  # which an option requires of each node
    "mem": lambda node: node.memory_mb,
    **dict.fromkeys(("cpus-per-task", "mincpus"), lambda node: node.cpus),
    **dict.fromkeys(("gres", "gpus-per-node", DEVICES), lambda node: count_gpus(node.gres)),
}


class LimitCheck(NamedTuple):
    """The result of the comparison; both are empty if Slurm does not answer."""

    faults: Sequence[str] = ()  # why the job can never start: value, rule, remedy
    warnings: Sequence[str] = ()  # why it waits, or runs at the speed of the smallest node


def read_options(directives: Sequence[str]) -> dict[str, str]:
    """Return the options of `#SBATCH` lines by long name."""
    rows = (line.removeprefix("#SBATCH --").partition("=") for line in directives)
    return {name: next(iter(shlex.split(value)), "") for name, _, value in rows}


def check_limits(options: Options, site: Site) -> LimitCheck:
    """Compare a job with the partitions that it is submitted to, of which one is enough."""
    try:
        partitions = site.partitions
        default = ",".join(name for name, row in partitions.items() if row.is_default)
        names = (options.get("partition") or default).split(",")
        # A hidden partition is not listed, but may be used; another cluster's are not known here.
        listed = [partitions[name] for name in names if name in partitions]
        if (
            "clusters" in options
            or not all(row.fields for row in listed)
            or len(listed) < len(names)
        ):
            return LimitCheck()
        if not any(count_gpus(node.gres) for node in site.nodes):
            options = {**options, DEVICES: "0"}  # Slurm counts no GPUs: jobs take whole nodes
        checks = [_check(options, partition, site.client) for partition in listed]
    except (SlurmError, ValueError):  # or a value that only Slurm can read
        return LimitCheck()
    return min(checks, key=lambda check: (len(check.faults), len(check.warnings)))


def _check(options: Options, partition: Partition, client: SlurmClient) -> LimitCheck:
    title = f"partition {partition.name}"
    state = partition.fields["State"]
    fitting = partition.nodes
    faults = []
    warnings = []
    for flag, fault in _limit_faults(options, partition, title):
        # A QOS may permit it. The job's own is known only if it is requested.
        qos = options.get("qos", "").lower()
        flags = client.qos_flags().items() if flag else ()
        allowing = [n for n, row in flags if flag in row.split(",") and qos in ("", n.lower())]
        remedy = f"{fault}, or another --partition"
        if allowing:
            warnings.append(f"{remedy}, unless the job's QOS is {' or '.join(allowing)}")
        else:
            faults.append(remedy)
    fewest, num_nodes = _node_range(options)
    for option, remedy, suited in (
        () if partition.hides_nodes else _requirements(options, partition.nodes, client)
    ):
        fitting = [node for node in fitting if node in suited]
        if len(fitting) < fewest:
            which = f"needs {format_plural(fewest, 'node')}; {title} has {len(suited)} suitable"
            if len(fitting) < len(suited):
                which += f", {len(fitting)} with all options together"
            faults.append(f"{option}: {which}; {remedy}, or use another --partition")
            break
    if state != "UP":
        fault = f"{title} is {state} until an administrator sets it to UP; another --partition"
        (warnings if state == "DOWN" else faults).append(fault)
    away = [f"{node.name} {node.state}" for node in fitting if not node.in_service]
    in_service = len(fitting) - len(away)
    if len(fitting) >= fewest > in_service:
        warnings.append(
            f"{title}: {in_service} of {fewest} nodes are in service "
            f"({format_names(away)}); the job waits for them: `sinfo --list-reasons`"
        )
    if num_nodes > 1 and (difference := describe_difference(fitting)):
        warnings.append(f"{difference}; {EQUAL_NODES}")
    return LimitCheck(faults, warnings)


def suitable_nodes(options: Options, nodes: Nodes, client: SlurmClient) -> list[PartitionNode]:
    suited = [fitting for _, _, fitting in _requirements(options, nodes, client)]
    return [node for node in nodes if all(node in fitting for fitting in suited)]


def describe_difference(nodes: Nodes) -> str:
    """Return `nodes differ: 3 × 4 CPUs, 1 × 2 CPUs (n4)`; empty if all are alike."""
    largest = max((node.memory_mb for node in nodes), default=0)
    kinds: dict[tuple[str, str, str], list[str]] = {}
    for node in nodes:
        # Firmware uses some of it.
        memory_mb = largest if node.memory_mb >= largest * 0.95 else node.memory_mb
        kind = f"{node.cpus} CPUs", f"{memory_mb / 1024:.0f} GiB", f"{count_gpus(node.gres)} GPUs"
        kinds.setdefault(kind, []).append(node.name)
    if len(kinds) < 2:
        return ""
    shared = set.intersection(*map(set, kinds))
    texts: list[str] = []
    for kind, names in sorted(kinds.items(), key=lambda item: -len(item[1])):
        listed = f" ({format_names(names)})" if texts else ""
        differing = " and ".join(trait for trait in kind if trait not in shared)
        texts.append(f"{len(names)} × {differing}{listed}")
    return f"nodes differ: {', '.join(texts)}"


def _node_range(options: Options) -> tuple[int, int]:
    fewest, _, largest = options.get("nodes", "1").partition("-")
    return int(fewest), int(largest or fewest)


def _limit_faults(options: Options, partition: Partition, title: str) -> Iterator[tuple[str, str]]:
    """Yield the text of each violated limit, and the flag of a QOS that permits it, if any."""
    fields = partition.fields
    limits = {name: limit for name, limit in fields.items() if limit[:1].isdigit()}  # UNLIMITED
    fewest, num_nodes = _node_range(options)
    time = options.get("time-min") or options.get("time", "0")
    memory = options.get("mem", "")
    qos = options.get("qos", "")
    if (limit := limits.get("MaxTime")) and minutes_of(time) > minutes_of(limit):
        yield (
            "PartitionTimeLimit",
            f"--time {time}: {title} permits {limit} (MaxTime); choose --time {limit} or less",
        )
    if (limit := limits.get("MaxNodes")) and fewest > int(limit):
        yield (
            "PartitionMaxNodes",
            f"--nodes {fewest}: {title} permits {limit} (MaxNodes); choose fewer",
        )
    if (limit := limits.get("MinNodes")) and num_nodes < int(limit):
        yield (
            "PartitionMinNodes",
            f"--nodes {num_nodes}: {title} requires {limit} (MinNodes); choose more",
        )
    if (limit := limits.get("MaxMemPerNode")) and _amount("mem", memory) > int(limit):
        yield "", f"--mem {memory}: {title} permits {limit}M (MaxMemPerNode); choose less"
    if fields.get("ReqResv") == "YES" and "reservation" not in options:
        yield "", f"{title}: takes only jobs with a --reservation (ReqResv); name one"
    allowed = partition.allowed("AllowQos")
    if qos and allowed is not None and qos.lower() not in allowed:
        names = fields["AllowQos"]
        yield "", f"--qos {qos}: {title} permits {names} (AllowQos); choose one of them"


def _requirements(
    options: Options, nodes: Nodes, client: SlurmClient
) -> Iterator[tuple[str, str, Nodes]]:
    """Yield option, remedy, and the nodes that have what the option requires of each node."""
    fewest, num_nodes = _node_range(options)
    yield f"--nodes {fewest}", f"choose {len(nodes)} or fewer", nodes
    if value := options.get("exclude"):
        names = client.hostnames(value)
        yield f"--exclude {value}", "exclude fewer", [n for n in nodes if n.name not in names]
    value = options.get("nodelist", "")
    if value and len(names := client.hostnames(value)) >= num_nodes:
        yield f"--nodelist {value}", "name its nodes", [n for n in nodes if n.name in names]
    value = options.get("constraint", "")
    if re.fullmatch(r"[\w.&-]+", value):  # of `|`, counts and brackets Slurm decides
        features = {node.name: {*node.features.split(",")} for node in nodes}
        names = sorted(set().union(*features.values()) - {""})
        remedy = f"no node of {nodes[0].partition if nodes else 'it'} has features: leave it out"
        if names:
            remedy = f"choose of {', '.join(names)}"
        suited = [node for node in nodes if features[node.name] >= {*value.split("&")}]
        yield f"--constraint {value}", remedy, suited
    for option, amount_of in _AMOUNTS.items():
        amounts = sorted(map(amount_of, nodes), reverse=True)[:fewest]
        if option in options and amounts:
            amount = _amount(option, options[option])
            unit = " MB" if option == "mem" else ""
            have = sum(amount_of(node) >= amounts[-1] for node in nodes)
            which = f"all {have}" if have == len(nodes) else f"{have} of its nodes"
            remedy = f"choose at most {amounts[-1]}{unit}, which {which} have"
            if not any(amounts):
                remedy = f"no node of {nodes[0].partition} has GPUs: leave it out"
            suited = [node for node in nodes if amount_of(node) >= amount]
            if option == DEVICES:
                remedy = f"nodes there have at most {amounts[0]} GPUs; choose another --cluster"
            yield f"{'' if '.' in option else '--'}{option} {options[option]}", remedy, suited


def _amount(option: str, value: str) -> float:
    """Return a number as of `_AMOUNTS`; 0 for what only Slurm can read."""
    if option in ("gres", "gpus-per-node"):
        return count_gpus(value if option == "gres" else f"gpu:{value}")
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", value.upper())
    return int(match[1]) * (_MB[match[2]] if option == "mem" else 1) if match else 0
