"""All nodes at once: start a program on each, read what they say, keep a time limit."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from slurmllm.config.resolve import RunConfig
from slurmllm.errors import StorageError
from slurmllm.health.across import with_comparison
from slurmllm.health.answer import Answer
from slurmllm.health.report import Line
from slurmllm.records import NodeHealth

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
