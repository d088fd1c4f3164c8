"""The node probe: run a program on all nodes, collect what it reports, compare the nodes.

A probe writes lines of JSON to its standard output (`report`), which are collected within a time
limit (`collect`). Findings that follow from all nodes together are added (`compare_nodes`).
"""

from __future__ import annotations

import os
import queue
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Protocol, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from slurmllm.core.config.cluster import HealthChecks
from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.errors import Blame, SlurmError
from slurmllm.core.run.records import (
    Finding,
    LaunchFailure,
    NodeHealth,
    NodeHealths,
    NodeNames,
    Versions,
)
from slurmllm.core.run.rundir import storage_errors
from slurmllm.core.slurm.client import Names
from slurmllm.core.slurm.error_texts import (
    ChildProcess,
    Command,
    Processes,
    StopCheck,
    launch_failure,
)
from slurmllm.launch.diagnose import fail, ok, warn

POLL_S = 0.1
_COMPARED = ("driver", "network ports")  # findings whose values are compared between the nodes


class Nodes(Protocol):
    """The nodes of an attempt or of a check: a Slurm allocation, or this machine."""

    nodes: NodeNames
    job_id: str | None

    @property
    def master_addr(self) -> str:
        """Name or address of the first node, as all others reach it."""

    def ask(self, command: Command) -> Processes:
        """Start a command on every node, by one srun or (locally) a process a node.

        Both outputs go to the process's pipe.
        """


class LaunchError(SlurmError):
    """A command did not start on the nodes."""

    def __init__(self, failure: LaunchFailure) -> None:
        self.failure = failure
        super().__init__(failure.text)


class JsonLine(BaseModel):
    """A message between processes: one line of output, a prefix and then JSON."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    # Marks the line, in output that also holds messages of srun and of libraries.
    PREFIX: ClassVar[str]

    def write(self) -> None:
        line = f"{self.PREFIX}{self.model_dump_json(exclude_none=True)}\n"
        sys.stdout.flush()
        # A single write(2): print() may split a line, and srun then mixes the lines of tasks.
        os.write(sys.stdout.fileno(), line.encode())

    @classmethod
    def parse(cls, output: str) -> Self | None:
        """The message in a line of output; None if the line is something else."""
        _, prefix, body = output.partition(cls.PREFIX)
        try:
            return cls.model_validate_json(body) if prefix else None
        except ValidationError:
            return None


def _shorten(finding: Finding) -> Finding:
    """Limit texts, so that a line stays below 1,024 bytes: srun splits longer ones."""
    limits = {"value": 100, "expected": 100, "message": 500}  # bytes; nodes send no fixes
    update = {}
    for name, limit in limits.items():
        value = getattr(finding, name)
        if isinstance(value, str) and len(value.encode()) > limit:
            update[name] = value.encode()[: limit - 3].decode(errors="ignore") + "…"
    return finding.model_copy(update=update)


class ProbeLine(JsonLine):
    """One message of a probe."""

    PREFIX: ClassVar[str] = "slurmllm-health "

    node: str  # the sender; empty for a measurement over all nodes
    time: float  # the sender's clock, Unix time, s
    finding: Annotated[Finding, AfterValidator(_shorten)] | None = None
    version: tuple[str, str] | None = None  # name and version of a library on the node
    took_s: float | None = None  # duration of all checks, s; in the last line
    gb_s: float | None = None  # bus bandwidth of an all-reduce, GB/s


def report(node: str, **fields: object) -> None:
    ProbeLine.model_validate({"node": node, "time": time.time(), **fields}).write()


@dataclass
class NodeReport:
    """What one node has reported so far."""

    findings: list[Finding] = field(default_factory=list)
    versions: Versions = field(default_factory=dict)
    checks_s: float | None = None  # s; None: not finished
    # The node's clock minus this machine's; None before the first line. A line arrives after it was
    # sent, so each line gives a lower bound: the highest is the best.
    clock_ahead_s: float | None = None
    # End of the message why it has not reported all: srun's line that names it, or the time waited.
    silence: str = ""
    refusal: str = ""  # of the node's set-up or interpreter

    def add(self, line: ProbeLine, arrived: float) -> None:
        ahead = line.time - arrived
        self.clock_ahead_s = max(ahead, ahead if self.clock_ahead_s is None else self.clock_ahead_s)
        if line.finding is not None:
            self.findings.append(line.finding)
        if line.version is not None:
            self.versions.update([line.version])
        if line.took_s is not None:
            self.checks_s = round(line.took_s, 3)


def check_nodes(
    nodes: Nodes,
    config: RunConfig,
    folder: Path,
    command: Command,
    stop: StopCheck = lambda: False,
) -> NodeHealths | None:
    """Run the checks of `node.py` on every node; returns the health of each, None if stopped.

    `folder` is on the shared file system, `command` is `python -m slurmllm`; `stop` is polled.
    Raises a StorageError if the folder cannot be written from here, a LaunchError if srun failed
    before any node reported.
    """
    limits = config.cluster.health
    with storage_errors(f"cannot write to {folder}", "check the file system"):
        folder.mkdir(parents=True, exist_ok=True)
        # A new random name: no node can have a cached lookup of it, negative or positive.
        marker = tempfile.NamedTemporaryFile(prefix=".health-marker-", dir=folder)  # noqa: SIM115
    with marker:
        probe = [*command, "check-node", "--profile", config.cluster.model_dump_json()]
        reports = collect(
            nodes.nodes,
            nodes.ask([*probe, "--backend", config.backend, "--marker-file", marker.name]),
            limits.timeout_s,
            stop,
        )
    return None if reports is None else compare_nodes(reports, limits)


def collect(
    names: Names,
    processes: Processes,
    limit_s: float,
    stop: StopCheck,
) -> dict[str, NodeReport] | None:
    """Collect a report for each name, also of nodes that did not respond; None if stopped.

    Raises a LaunchError if the processes failed before any node reported.
    """
    reports = {name: NodeReport() for name in names}
    started = time.monotonic()
    lines = []
    for arrived, output in read_lines(processes, limit_s, stop):
        line = ProbeLine.parse(output)
        if line and line.node in reports:
            reports[line.node].add(line, arrived)
        elif output.strip():
            print(output.rstrip(), file=sys.stderr, flush=True)
            lines.append(output)
            for name in set(output.replace(":", " ").split()) & reports.keys():
                reports[name].silence = f": {output.strip()}"
    if stop():
        return None
    seconds = time.monotonic() - started
    failure = launch_failure(processes, seconds, lines, names)
    late = seconds >= limit_s  # this process ended srun: its exit code shows nothing
    silent = all(report.clock_ahead_s is None for report in reports.values())
    # After the time limit, only a cause that srun's messages name counts.
    if failure and silent and (not late or failure.fault not in ("unknown", "result")):
        raise LaunchError(failure)
    ended = f": {failure.text}" if failure else f" in {seconds:.1f} s"
    for name, report in reports.items():
        report.silence = report.silence or (f" within {limit_s:g} s" if late else ended)
        if failure and failure.fault == "user" and name in (failure.nodes or names):
            report.refusal = failure.message.removeprefix(f"{name}: ")
    return reports


def unstarted(names: Names, failure: LaunchFailure) -> NodeHealths:
    """Return findings of checks that did not start: accused nodes fail, others get a warning."""
    findings = {}
    for name in names:
        status = fail if name in failure.accused else warn
        findings[name] = NodeHealth(
            node=name, findings=(status("answer", "none", "", f"no response: {failure.text}"),)
        )
    return findings


def read_lines(
    processes: Processes, limit_s: float, stop: StopCheck
) -> Iterator[tuple[float, str]]:
    """Yield (Unix time of arrival, line) of the processes' output; ends them at the end."""
    lines: queue.SimpleQueue[tuple[float, str]] = queue.SimpleQueue()

    def pump(process: ChildProcess) -> None:
        assert process.stdout is not None
        with process.stdout as stream:
            for line in stream:
                # The arrival is taken here and not by the consumer, which may be late.
                lines.put((time.time(), line.decode(errors="replace")))

    threads = [threading.Thread(target=pump, args=(p,), daemon=True) for p in processes]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + limit_s
    try:
        while time.monotonic() < deadline and not stop():
            # Before the queue is read: a thread that has ended has put its last line.
            ended = not any(thread.is_alive() for thread in threads)
            try:
                yield lines.get(timeout=0.0 if ended else POLL_S)
            except queue.Empty:
                if ended:
                    break
    finally:
        for process in processes:
            process.terminate()  # srun then ends its tasks
        deadline = time.monotonic() + 5.0  # then SIGKILL
        for process in processes:
            try:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def compare_nodes(reports: Mapping[str, NodeReport], limits: HealthChecks) -> NodeHealths:
    """The nodes' own findings, and those that follow from all nodes: response, clock, versions."""
    median_ahead_s = statistics.median(
        [r.clock_ahead_s for r in reports.values() if r.clock_ahead_s is not None] or [0.0]
    )
    versions = {
        name: node.versions
        | {f.check: str(f.value) for f in node.findings if f.check in _COMPARED and f.value}
        for name, node in reports.items()
    }
    version_findings = dict(_version_findings(versions, limits))
    compared = {}
    for name, node in reports.items():
        findings = [*node.findings]
        if node.checks_s is None:
            after = f" after the check of {findings[-1].check}" if findings else ""
            answered = re.search(r": tasks? [\d,-]+: ", node.silence)
            message = f"{'it ended' if answered else 'no response'}{after}{node.silence}"
            blame: Blame = "user" if node.refusal else "infrastructure"
            findings.append(fail("answer", "none", "", node.refusal or message, blame=blame))
        if node.clock_ahead_s is not None and len(reports) > 1:
            limit = limits.max_clock_skew_s
            # Against the median of the nodes: this machine's own clock may be wrong.
            ahead = round(node.clock_ahead_s - median_ahead_s, 2) + 0.0  # turns -0.0 into 0.0
            if abs(ahead) <= limit:
                findings.append(ok("clock", ahead, limit))
            else:
                message = f"the clock differs by {ahead:+g} s from the other nodes'; the limit is "
                findings.append(fail("clock", ahead, limit, f"{message}{limit:g} s"))
        if name in version_findings:
            findings.append(version_findings[name])
        compared[name] = NodeHealth(
            node=name,
            findings=tuple(findings),
            versions=node.versions,
            checks_s=node.checks_s,
        )
    return compared


def _version_findings(
    versions: Mapping[str, Versions], limits: HealthChecks
) -> Iterator[tuple[str, Finding]]:
    """Yield (node, finding) of each node that reports versions: is it as most nodes are?"""
    reporting = {name: of_node for name, of_node in versions.items() if of_node}
    majority = {}  # library → its version on more than half of the nodes, else ""
    for library in {library for of_node in reporting.values() for library in of_node}:
        counts = Counter(of_node.get(library, "none") for of_node in reporting.values())
        (version, count), *_ = counts.most_common(1)
        majority[library] = version if 2 * count > counts.total() else ""
    for name, here in reporting.items():
        odd = sorted(lib for lib, version in majority.items() if here.get(lib, "none") != version)
        if not odd:
            yield name, ok("versions", f"{len(here)} the same")
            continue
        message = ", ".join(
            f"{lib} {here.get(lib, 'none')} here, {majority[lib] or 'several'} on the others"
            for lib in odd
        )
        # Without a majority it is unknown which nodes are wrong: warn only.
        strict = limits.unequal_versions == "fail" and any(majority[lib] for lib in odd)
        status = fail if strict else warn
        yield name, status("versions", f"{len(odd)} other", "as on most nodes", message)
