"""All nodes at once: start a program on each, read what they say, keep a time limit."""

from __future__ import annotations

import contextlib
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from slurmllm.config.cluster import HealthChecks
from slurmllm.config.resolve import RunConfig
from slurmllm.diagnose.finding import fail, ok, warn
from slurmllm.errors import StorageError
from slurmllm.records import HealthFinding, NodeHealth

POLL_S = 0.1
END_S = 5.0  # for a program that was told to end


class Nodes(Protocol):
    """The nodes to ask: an allocation of Slurm's, or this machine."""

    nodes: tuple[str, ...]

    @property
    def master_addr(self) -> str:
        """The name or address by which all nodes reach the first one."""

    def ask(self, command: Sequence[str]) -> list[subprocess.Popen[bytes]]:
        """Start a command on every node, its output in the processes' pipes."""


@dataclass
class Answers:
    """What all nodes have said.

    Attributes:
        by_node: One for each node asked.
        stopped: Whether the asking was broken off before its end.
    """

    by_node: dict[str, Answer] = field(default_factory=dict)
    stopped: bool = False


def check_nodes(
    nodes: Nodes,
    config: RunConfig,
    folder: Path,
    command: Sequence[str],
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, NodeHealth] | None:
    """Have every node check itself.

    Args:
        nodes: Those to ask.
        config: With the profile that they are held against.
        folder: On the file system that they share.
        command: `python -m slurmllm`.
        stop: Asked now and then whether to break off.

    Returns:
        By node, all of them; None where it was broken off.

    Raises:
        StorageError: the folder cannot be written from here.
        SlurmError: srun is absent.
    """
    limits = config.cluster.health
    with _token(folder) as token:
        processes = nodes.ask(
            [*command, "check-node", "--profile", config.cluster.model_dump_json(),
             "--backend", config.backend, "--token", str(token)]
        )  # fmt: skip
        found = answers(nodes.nodes, processes, limits.timeout_s, stop)
    return None if found.stopped else with_comparison(found.by_node, limits)


def answers(
    names: Sequence[str],
    processes: Sequence[subprocess.Popen[bytes]],
    limit_s: float,
    stop: Callable[[], bool],
) -> Answers:
    """Collect what nodes say of themselves until all have ended, or the time is over."""
    found = Answers({name: Answer(NodeHealth(node=name)) for name in names})
    for arrived, text in read(processes, limit_s, stop):
        line = Line.read(text)
        if line is not None and line.node in found.by_node:
            found.by_node[line.node].take(line, arrived)
        elif text.strip():
            print(text.rstrip(), file=sys.stderr, flush=True)
            for name, answer in found.by_node.items():
                if name in text.replace(":", " ").split():
                    answer.aside = text.strip()
    found.stopped = stop()
    return found


def read(
    processes: Sequence[subprocess.Popen[bytes]], limit_s: float, stop: Callable[[], bool]
) -> Iterator[tuple[float, str]]:
    """(Unix time of arrival, line) of what processes print; then they are ended."""
    lines: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

    def pump(process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as stream:
            for line in stream:
                lines.put((time.time(), line))

    threads = [threading.Thread(target=pump, args=(p,), daemon=True) for p in processes]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + limit_s
    try:
        while time.monotonic() < deadline and not stop():
            ended = not any(thread.is_alive() for thread in threads)
            try:
                arrived, line = lines.get(timeout=0.0 if ended else POLL_S)
            except queue.Empty:
                if ended:
                    break
                continue
            yield arrived, line.decode(errors="replace")
    finally:
        end(processes)


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End what still runs: asked to, then by force. srun ends its tasks when it is asked to."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + END_S
    for process in processes:
        try:
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def _token(folder: Path) -> Iterator[Path]:
    """A file of a name that nobody has looked for yet."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(prefix=".health-token-", dir=folder) as file:
            yield Path(file.name)
    except OSError as error:
        raise StorageError(
            f"cannot write to {folder}: {error.strerror or error}; mend the file system"
        ) from error


@dataclass
class Answer:
    """What one node has said so far.

    Attributes:
        ahead_s: The node's clock less this one's. What a line says is older than its arrival, so
            that each is a lower bound, and the highest of them the best.
        aside: The last line that names the node and is not its own: srun's words.
    """

    health: NodeHealth
    ahead_s: float | None = None
    aside: str = ""

    def take(self, line: Line, arrived: float) -> None:
        """Add a line."""
        ahead = line.time - arrived
        self.ahead_s = ahead if self.ahead_s is None else max(self.ahead_s, ahead)
        health, update = self.health, dict[str, object]()
        if line.finding is not None:
            update["findings"] = (*health.findings, line.finding)
        if line.version is not None:
            update["versions"] = {**health.versions, line.version[0]: line.version[1]}
        if line.took_s is not None:
            update["checks_s"] = round(line.took_s, 3)
        self.health = health.model_copy(update=update)


class Said(BaseModel):
    """What is said.

    Attributes:
        HEAD: What such a line begins with.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    HEAD: ClassVar[str]

    def say(self) -> None:
        """Write the line at once and in one piece."""
        text = f"{self.HEAD}{self.model_dump_json(exclude_none=True)}\n"
        sys.stdout.flush()
        os.write(sys.stdout.fileno(), text.encode())

    @classmethod
    def read(cls, text: str) -> Self | None:
        """What is said in a piece of output; None where it is something else."""
        _, head, body = text.partition(cls.HEAD)
        try:
            return cls.model_validate_json(body) if head else None
        except ValidationError:
            return None


class Line(Said):
    """One line.

    Attributes:
        node: Who says it; empty for a measurement over all nodes.
        time: Unix time there, s.
        finding: What a check found.
        version: Name and version of something that is installed there.
        took_s: Seconds of all checks; with the last line.
        gb_s: Bus bandwidth of an all-reduce, GB/s.
    """

    HEAD: ClassVar[str] = "slurmllm-health "

    node: str
    time: float
    finding: HealthFinding | None = None
    version: tuple[str, str] | None = None
    took_s: float | None = None
    gb_s: float | None = None


def say(node: str, **said: object) -> None:
    """Say one thing."""
    Line.model_validate({"node": node, "time": time.time(), **said}).say()


def with_comparison(answers: Mapping[str, Answer], limits: HealthChecks) -> dict[str, NodeHealth]:
    """The nodes' own findings and those that follow from all of them."""
    ahead_s = [a.ahead_s for a in answers.values() if a.ahead_s is not None]
    usual_s = statistics.median(ahead_s or [0.0])
    # Where nobody answers, Slurm started nothing at all, because of the nodes that it names.
    led_astray = not ahead_s and any(answer.aside for answer in answers.values())
    versions = {name: _versions(answer.health) for name, answer in answers.items()}
    found = {}
    for name, answer in answers.items():
        more = [_answered(answer, limits, told=warn if led_astray and not answer.aside else fail)]
        if answer.ahead_s is not None and len(answers) > 1:
            more.append(_clock(answer.ahead_s - usual_s, limits))
        if versions[name]:
            more.append(_same(versions[name], _usual(versions), limits))
        findings = (*answer.health.findings, *(finding for finding in more if finding))
        found[name] = answer.health.model_copy(update={"findings": findings})
    return found


def _answered(
    answer: Answer, limits: HealthChecks, told: Callable[[str, str, str, str], HealthFinding]
) -> HealthFinding | None:
    """What is told of a node that did not see its checks through."""
    if answer.health.checks_s is not None:
        return None
    done = answer.health.findings
    words = f"no more word after the check of {done[-1].check}" if done else "no answer"
    said = f": {answer.aside}" if answer.aside else f" within {limits.timeout_s:g} s"
    return told("answer", "none", "", words + said)


def _clock(ahead_s: float, limits: HealthChecks) -> HealthFinding:
    """A node's clock against the median of all nodes'."""
    # 0.0 is added because -0.0 looks odd.
    ahead, limit = round(ahead_s, 2) + 0.0, limits.max_clock_skew_s
    if abs(ahead) > limit:
        words = f"the clock is {ahead:+g} s off those of the other nodes, at most {limit:g} may be"
        return fail("clock", ahead, limit, words)
    return ok("clock", ahead, limit)


def _versions(health: NodeHealth) -> dict[str, str]:
    driver = next((str(f.value) for f in health.findings if f.check == "driver"), None)
    return health.versions | ({"driver": driver} if driver else {})


def _usual(versions: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """The version that more than half of the nodes have, of all that have one."""
    usual = {}
    for what in {what for of_node in versions.values() for what in of_node}:
        counts = Counter(of_node.get(what, "none") for of_node in versions.values() if of_node)
        (version, count), *_ = counts.most_common(1)
        usual[what] = version if 2 * count > counts.total() else ""
    return usual


def _same(own: Mapping[str, str], usual: Mapping[str, str], limits: HealthChecks) -> HealthFinding:
    """A node's versions against those of most."""
    odd = sorted(what for what, version in usual.items() if own.get(what, "none") != version)
    if not odd:
        return ok("versions", f"{len(own)} the same")
    words = ", ".join(
        f"{what} {own.get(what, 'none')} here, {usual[what] or 'several'} on the others"
        for what in odd
    )
    # Where no version is most nodes', nobody can say which of them are wrong.
    told = fail if limits.unequal_versions == "fail" and any(usual[w] for w in odd) else warn
    return told("versions", f"{len(odd)} other", "as on most nodes", words)
