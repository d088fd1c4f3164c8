"""The profile of a partition: the shipped one that it extends, and a comment on each line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date
from typing import Any

from slurmllm.config.cluster import Cluster
from slurmllm.config.profiles import Level, extended
from slurmllm.config.schema import schema_line
from slurmllm.config.yaml_source import parse_yaml, write_yaml
from slurmllm.format import format_plural
from slurmllm.init.figures import Figures, nearest_figures, shipped_values
from slurmllm.init.survey import NodeKind, Partition, Survey

_DISK = "/var/tmp"  # noqa: S108 (every Linux has it on a disk; the caches there are private)
_COLUMN = 34  # of the comments


@dataclass(frozen=True)
class Draft:
    """A profile of a partition's most numerous devices, to be written."""

    figures: Figures
    kind: NodeKind
    text: str

    def cluster(self) -> Cluster:
        """Return the profile with all that it extends."""
        values = parse_yaml(self.text)
        base: Level = shipped_values(values.pop("extends")), {}
        return Cluster.model_validate({**extended(base, (values, {}))[0], "name": "draft"})


def draft_profile(survey: Survey, partition: Partition) -> Draft:
    """Return the profile of a partition."""
    kind, machine = partition.kinds[0], survey.machine
    figures = nearest_figures(kind)
    header = [
        schema_line("cluster").strip(),
        f"# By `slurmllm init` on {machine.host}, {date.today()}. Check the lines with a comment.",
    ]
    lines = _lines(survey, partition, kind, figures)
    rows = [f"{line:<{_COLUMN}}  # {comment}" if comment else line for line, comment in lines]
    return Draft(figures, kind, "\n".join([*header, *rows]) + "\n")


def _lines(
    survey: Survey, partition: Partition, kind: NodeKind, figures: Figures
) -> Iterator[tuple[str, str]]:
    machine, base = survey.machine, shipped_values(figures.profile)
    yield f"extends: {figures.profile}", f"hardware figures, {figures.confidence}: {figures.reason}"
    gpus = f"{kind.gpus} {kind.gpu_type or 'GPUs'}, " if kind.gpus else ""
    text = f"{gpus}{kind.cpus} CPUs, {kind.memory_mb / 1024:.0f} GiB"
    text = f"{format_plural(len(kind.nodes), 'node')} of {text}"
    yield _yaml({"description": f"{survey.name}, partition {partition.name}: {text}"}), ""
    others = ", ".join(name for name in survey.partitions if name != partition.name)
    limit = f"time limit {partition.time_limit}" + f"; others: {others}" * bool(others)
    yield _yaml({"partition": partition.name}), limit
    devices = kind.gpus or base["devices_per_node"]
    yield f"devices_per_node: {devices}", "GPUs by Slurm" if kind.gpus else "workers"
    yield f"cpus_per_node: {kind.cpus}", "by Slurm"
    yield from _disk_line(survey, figures, base)
    yield "exclusive: true", "whole nodes; false: also give --cpus-per-task and --mem"
    inherited = () if kind.gpus else base.get("directives", ())  # a list replaces the other one
    yield from _directive_lines(survey, partition, kind, inherited)
    if machine.modules:
        loaded = f"; loaded now: {' '.join(machine.loaded)}" if machine.loaded else ""
        yield "# setup:", f"lines of shell for each job; {machine.modules}{loaded}"
        yield "#   - module load cuda", ""
    unsure = ", which the nodes must see too" * (not machine.python_is_shared)
    comment = f"of the jobs, else that of submit; on {machine.python_file_system}{unsure}"
    yield f"# python: {machine.python}", comment
    if machine.python_is_shared:
        yield "# stage_environment: true", "start from a copy of it on the node's disk"
    if machine.containers:
        yield "# container:", f"on {machine.host}: {', '.join(machine.containers)}"
        yield f"#   runtime: {machine.containers[0]}", ""
        yield "#   image: /shared/slurmllm.sif", "with torch, and slurmllm of this version"
    if figures.changes:
        yield f"# Not as {figures.profile}; `slurmllm calibrate` measures the figures:", ""
        yield _yaml(figures.changes), ""


def _disk_line(survey: Survey, figures: Figures, base: dict[str, Any]) -> Iterator[tuple[str, str]]:
    seen = f"here: {', '.join(survey.machine.disks) or 'none'}"
    configured = survey.settings.get("TmpFS", "")
    if figures.confidence == "exact":
        yield f"node_local: {base['node_local']}", f"a disk of each node, {figures.profile}'s"
    elif configured.startswith("/") and configured != "/tmp":  # noqa: S108 (Slurm's default)
        yield _yaml({"node_local": configured}), f"TmpFS of slurm.conf; {seen}"
    else:
        yield f"node_local: {_DISK}", f"a disk of each node; {seen}"


def _directive_lines(
    survey: Survey, partition: Partition, kind: NodeKind, inherited: Iterable[str]
) -> Iterator[tuple[str, str]]:
    options = dict.fromkeys(inherited, "")
    if kind.gpus:
        others = sum(len(other.nodes) for other in partition.kinds[1:])
        count = f"{kind.gpu_type}:{kind.gpus}" if others and kind.gpu_type else str(kind.gpus)
        text = f"leaves out {format_plural(others, 'node')} of the partition"
        options[f"--gpus-per-node={count}"] = text * bool(others)
    for settings in (survey.settings, partition.fields):
        for name in ("DefMemPerNode", "DefMemPerCPU"):
            if (default := settings.get(name, "UNLIMITED")) != "UNLIMITED":
                options["--mem=0"] = f"all of the node's: a job without it gets {name}={default}"
    comments = dict[str, str]()
    for option, names, default, allowed in _charges(survey, partition):
        usable = [name for name in names if allowed is None or name.lower() in allowed]
        text = ", ".join(f"{name} (default)" if name == default else name for name in names)
        if usable and default not in usable:
            options[f"--{option}={usable[0]}"] = f"{partition.name} takes it; yours: {text}"
        elif names:
            comments[f"--{option}={default or names[0]}"] = f"yours: {text}"
    if kind.features:
        comments[f"--constraint={kind.features[0]}"] = f"features: {', '.join(kind.features)}"
    yield "directives:" if options else "# directives:", "further options of sbatch"
    yield from ((f"  - {option}", comment) for option, comment in options.items())
    yield from ((f"  # - {option}", comment) for option, comment in comments.items())


def _charges(
    survey: Survey, partition: Partition
) -> Iterator[tuple[str, list[str], str, list[str] | None]]:
    """Yield option, the user's values, that of jobs without it, and those that are allowed."""
    rows = [row for row in survey.associations if row.partition in ("", partition.name)]
    accounts = list(dict.fromkeys(row.account for row in rows))
    default = next((row.account for row in rows if row.default), "")
    yield "account", accounts, default, _allowed(partition, "AllowAccounts")
    of_default = [row for row in rows if row.default] or rows[:1]
    qos = list(dict.fromkeys(name for row in of_default for name in row.qos if name))
    chosen = next((row.default_qos for row in of_default if row.default_qos), "")
    yield "qos", qos, chosen or next(iter(qos), ""), _allowed(partition, "AllowQos")


def _allowed(partition: Partition, name: str) -> list[str] | None:
    text = partition.fields.get(name, "ALL")
    return None if text == "ALL" else text.lower().split(",")


def _yaml(values: dict[str, Any]) -> str:
    return write_yaml(values).rstrip("\n")
