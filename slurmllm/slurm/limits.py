"""Compare a job's request with its partition's limits and nodes, before sbatch gets it.

By default Slurm accepts a job beyond the limits of its partition (EnforcePartLimits), and the job
is pending for ever. Limits of accounts and QOS are not compared: waiting_reasons.yaml has them.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from slurmllm.config.rules import minutes_of
from slurmllm.errors import SlurmError
from slurmllm.format import format_plural
from slurmllm.slurm.client import PartitionNode, SlurmClient, count_gpus

_MB = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2}
_SAME_MEMORY = 0.95  # nodes of one kind differ in what their firmware takes
_SHOWN = 5  # nodes
_ELSE = "or another --partition"


class Limits(NamedTuple):
    """The result of the comparison; both are empty if Slurm does not answer."""

    faults: Sequence[str] = ()  # why the job can never start: value, rule, remedy
    warnings: Sequence[str] = ()  # why it waits, or runs at the speed of the smallest node


def read_options(script: str) -> dict[str, str]:
    """Return the options in the #SBATCH lines of a script, by long name."""
    rows = re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", script, re.M)
    return {name: next(iter(shlex.split(value)), "") for name, value in rows}


def check_limits(options: Mapping[str, str], client: SlurmClient) -> Limits:
    """Compare a job with the partitions that it is submitted to, of which one is enough."""
    try:
        partitions, nodes = client.partitions(), client.partition_nodes()
        default = next(
            (name for name, row in partitions.items() if row.get("Default") == "YES"), ""
        )
        text = options.get("partition") or os.environ.get("SBATCH_PARTITION") or default
        # A hidden partition is not listed, but may be used; another cluster's are not known here.
        if "clusters" in options or not all(name in partitions for name in text.split(",")):
            return Limits()
        rows = [_Request(options, partitions[n], client).check(nodes) for n in text.split(",")]
    except SlurmError:
        return Limits()
    return next((row for row in rows if not row.faults), rows[0])


def describe_difference(nodes: Sequence[PartitionNode]) -> str:
    """Return `nodes differ: 3 × 4 CPUs, 1 × 2 CPUs (n4)`; empty if all are alike."""
    memory = sorted({node.memory_mb for node in nodes}, reverse=True)
    classes = [next(m for m in memory if mb >= m * _SAME_MEMORY) for mb in memory]
    of_class = dict(zip(memory, classes, strict=True))
    columns: dict[str, Callable[[PartitionNode], str]] = {
        "CPUs": lambda node: f"{node.cpus} CPUs",
        "memory": lambda node: f"{of_class[node.memory_mb] / 1024:.0f} GiB",
        "GPUs": lambda node: f"{count_gpus(node.gres)} GPUs",
    }
    differing = [text for text in columns.values() if len({text(node) for node in nodes}) > 1]
    kinds: dict[str, list[str]] = {}
    for node in nodes:
        kinds.setdefault(" and ".join(text(node) for text in differing), []).append(node.name)
    first, *others = sorted(kinds.items(), key=lambda kind: -len(kind[1]))
    texts = [f"{len(first[1])} × {first[0]}"]
    for kind, names in others:
        shown = ", ".join(names[:_SHOWN]) + ", …" * (len(names) > _SHOWN)
        texts.append(f"{len(names)} × {kind} ({shown})")
    return f"nodes differ: {', '.join(texts)}" if differing else ""


class _Request:
    """A job and the partition that it is submitted to."""

    def __init__(
        self, options: Mapping[str, str], partition: Mapping[str, str], client: SlurmClient
    ) -> None:
        self.options, self.partition, self.client = options, partition, client
        self.name = partition["PartitionName"]
        numbers = [int(number) for number in options.get("nodes", "1").split("-")]
        self.fewest, self.most = numbers[0], numbers[-1]

    def check(self, nodes: Sequence[PartitionNode]) -> Limits:
        members = [node for node in nodes if node.partition == self.name]
        faults, warnings = [], []
        for flag, fault in self._limit_faults():
            # A QOS may permit it. The job's own is known only if it is requested.
            qos = self.options.get("qos")
            flags = self.client.qos_flags() if flag else {}
            names = [n for n, text in flags.items() if flag in text.split(",")]
            if permitted := [n for n in names if qos in (None, n)]:
                warnings.append(f"{fault}, unless the job's QOS is {' or '.join(permitted)}")
            else:
                faults.append(fault)
        fitting = members
        for option, remedy, suited in self._requirements(members):
            fitting = [node for node in fitting if node in suited]
            if len(fitting) < self.fewest:
                which = f"partition {self.name} has {format_plural(len(suited), 'such node')}"
                if len(fitting) < len(suited):
                    which += f", {len(fitting)} by all options together"
                faults.append(f"{option}: {which}; {self.fewest} needed: {remedy}, {_ELSE}")
                break
        state = self.partition.get("State", "UP")
        if state != "UP":
            text = f"partition {self.name} is {state}: an administrator sets it to UP; {_ELSE[3:]}"
            (warnings if state == "DOWN" else faults).append(text)
        usable = [node for node in fitting if node.in_service]
        if not faults and len(usable) < self.fewest:
            away = [f"{n.name} {n.state}" for n in fitting if not n.in_service][:_SHOWN]
            warnings.append(
                f"partition {self.name}: {len(usable)} of {self.fewest} nodes are in service "
                f"({', '.join(away)}); the job waits for them: `sinfo --list-reasons`"
            )
        if self.fewest > 1 and fitting and (difference := describe_difference(fitting)):
            text = "all workers wait for the smallest; --constraint or --exclude chooses equal ones"
            warnings.append(f"{difference}; {text}")
        return Limits(faults, warnings)

    def _limit_faults(self) -> Iterator[tuple[str, str]]:
        """Yield the flag of a QOS that permits a violated limit, or nothing, and the text."""
        options, where = self.options, f"partition {self.name}"

        def limit(name: str) -> str | None:
            value = self.partition.get(name, "")
            return value if re.match(r"\d", value) else None  # UNLIMITED, NONE

        time = options.get("time-min") or options.get("time", "0")
        if (most := limit("MaxTime")) and minutes_of(time) > minutes_of(most):
            text = f"--time {time}: {where} permits {most} (MaxTime); choose --time {most} or less"
            yield "PartitionTimeLimit", f"{text}, {_ELSE}"
        if (most := limit("MaxNodes")) and self.fewest > int(most):
            text = f"--nodes {self.fewest}: {where} permits {most} (MaxNodes); choose fewer"
            yield "PartitionMaxNodes", f"{text}, {_ELSE}"
        if (least := limit("MinNodes")) and self.most < int(least):
            text = f"--nodes {self.most}: {where} requires {least} (MinNodes); choose more"
            yield "PartitionMinNodes", f"{text}, {_ELSE}"
        most = limit("MaxMemPerNode")
        if most and _amount("mem", options.get("mem", "")) > int(most):
            text = f"--mem {options['mem']}: {where} permits {most}M a node (MaxMemPerNode)"
            yield "", f"{text}; choose --mem {most}M or less, {_ELSE}"
        if self.partition.get("ReqResv") == "YES" and "reservation" not in options:
            yield "", f"{where}: takes only jobs with a --reservation; name one, {_ELSE}"
        qos, allowed = options.get("qos"), self.partition.get("AllowQos", "ALL")
        if qos and allowed != "ALL" and qos not in allowed.split(","):
            yield "", f"--qos {qos}: {where} permits {allowed} (AllowQos); choose one, {_ELSE}"

    def _requirements(
        self, nodes: Sequence[PartitionNode]
    ) -> Iterator[tuple[str, str, Sequence[PartitionNode]]]:
        """Yield option, remedy, and the nodes that have what the option requires of each node."""
        options = self.options
        yield f"--nodes {self.fewest}", f"choose {len(nodes)} or fewer", nodes
        if text := options.get("exclude"):
            names = self.client.hostnames(text)
            yield f"--exclude {text}", "exclude fewer", [n for n in nodes if n.name not in names]
        text = options.get("nodelist", "")
        if text and len(names := self.client.hostnames(text)) >= self.most:
            yield f"--nodelist {text}", "name its nodes", [n for n in nodes if n.name in names]
        text = options.get("constraint", "")
        if re.fullmatch(r"[\w.&-]+", text):  # of `|`, counts and brackets Slurm decides
            features = {n.name: set(n.features.split(",")) for n in nodes}
            remedy = f"choose of {', '.join(sorted(set().union(*features.values()) - {''}))}"
            suited = [n for n in nodes if features[n.name] >= set(text.split("&"))]
            yield f"--constraint {text}", remedy, suited
        for option, amount_of in _AMOUNTS.items():
            amounts = sorted(map(amount_of, nodes), reverse=True)[: self.fewest]
            if option in options and amounts:
                amount, unit = _amount(option, options[option]), " MB" * (option == "mem")
                remedy = f"{self.fewest} of its nodes have {amounts[-1]}{unit}; choose no more"
                suited = [n for n in nodes if amount_of(n) >= amount]
                yield f"--{option} {options[option]}", remedy, suited


_AMOUNTS: dict[str, Callable[[PartitionNode], int]] = {
    "mem": lambda node: node.memory_mb,
    **dict.fromkeys(("cpus-per-task", "mincpus"), lambda node: node.cpus),
    **dict.fromkeys(("gres", "gpus-per-node"), lambda node: count_gpus(node.gres)),
}


def _amount(option: str, text: str) -> float:
    """Return a number as of `_AMOUNTS`; 0 for what only Slurm can read."""
    if option in ("gres", "gpus-per-node"):
        return count_gpus(text if option == "gres" else f"gpu:{text}")
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", text.upper())
    return int(match[1]) * (_MB[match[2]] if option == "mem" else 1) if match else 0
