"""Scenes: tests that run at the same time on one real Slurm.

The body of a test marked by `scene` is played in a thread, at the same time as those of all other
selected tests, on one cluster; the test itself waits for its outcome. So their waits overlap.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Protocol

import pytest
from end_to_end.bench import REHEARSED, SMALL, BenchOfThreads

from slurmllm.core.slurm.client import SlurmClient

AT_A_TIME = 6  # with more, two cores exceed Slurm's time limits
ALONE = 9
# Used last: nodes with features, for a job of any size, for jobs that wait in the queue.
CONF = """\
NodeName=n13 CPUs=4 Feature=h100 Weight=10
NodeName=n14 CPUs=4 Feature=h100 Weight=10
NodeName=n15 CPUs=4 Feature=a100 Weight=10
NodeName=n16 CPUs=4 Feature=a100 Weight=10
NodeName=n17 CPUs=4 Weight=20
NodeName=n18 CPUs=4 Weight=20
NodeName=n19 CPUs=4 Weight=20
NodeName=n20 CPUs=4 Weight=20
NodeName=n21 CPUs=4 Weight=30
NodeName=n22 CPUs=4 Weight=30
"""
# KillWait is Slurm's default; slurmds that share two cores answer late.
CLUSTER = ("--nodes=22", "--kill-wait=30", "--slurmd-timeout=15", "--shared-mb=48")


class Cluster(Protocol):
    """The development cluster's verbs (tests/conftest.DevCluster)."""

    def call(self, *arguments: str) -> str: ...


class SceneBench(BenchOfThreads):
    """The command line in a folder of runs, and the cluster of the scenes.

    Args:
        folder: Of the runs.
        shared: A file system of the nodes that can be full, which no other scene uses.
        inputs: Corpus and tokenizer, as `--set` options.
    """

    patience_s = 1200.0  # a scene may wait for all others

    def __init__(self, cluster: Cluster, folder: Path, shared: Path, inputs: tuple[str, ...]):
        super().__init__(folder)
        self.cluster, self.shared, self.inputs = cluster, shared, inputs
        self._once = threading.Lock()
        self._jobs: dict[int, list[str]] = defaultdict(list)  # thread → names of its train jobs

    def line(self, name: str) -> tuple[str, ...]:
        """The command that submits a small run on two nodes."""
        return ("submit", "tiny_neox", "--nodes=2", f"--name={name}", *SMALL, *self.inputs)

    def submit(self, name: str, *options: str) -> str:
        """Submit a run on two nodes, or as `options` say; returns its train job."""
        self._jobs[threading.get_ident()].append(f"{name}-train")
        return str(json.loads(self.look(*self.line(name), *options, "--json"))["jobs"]["train"])

    def clear(self, failed: bool) -> None:
        """Forget the jobs of this thread's scene; end them, if it failed, as others need nodes."""
        names = self._jobs.pop(threading.get_ident(), [])
        if failed and names:
            subprocess.run(["scancel", f"--jobname={','.join(names)}"], check=False)

    def once(self, name: str, submit: Callable[[], object]) -> None:
        """Submit a run that several scenes share, by the first of them."""
        with self._once:
            if not (self.runs / name).is_dir():
                submit()
                self._jobs.pop(threading.get_ident(), None)  # it is not this scene's own

    def rehearsed(self) -> str:
        """The unbroken rehearsed run of both stages."""
        options = (*REHEARSED, "--precompile=always")
        self.once("undisturbed", lambda: self.submit("undisturbed", *options))
        self.wait("undisturbed", "done")
        return "undisturbed"

    def lose_node(self, name: str, node: str) -> None:
        """Cut a node's power while a run uses it; wait until the run has ended."""
        self.cluster.call("fail", node)
        try:
            self.wait(name, "done", "stopped", "cancelled")
        finally:
            self.cluster.call("heal", node)


def accounted(job: str) -> list[str]:
    """The states of a job's incarnations, by sacct."""
    return [row.state for row in SlurmClient().accounting(job) if row.job_id == job]


def scene(order: int = 1) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Have the body of a test played with those of all others.

    Args:
        order: Scenes of a lower one start earlier; ALONE: after all others, one at a time.
    """

    def decorate(play: Callable[..., None]) -> Callable[..., None]:
        def test(scenes: Scenes, request: pytest.FixtureRequest, **_: Any) -> None:
            scenes.outcomes[request.node.nodeid].result()

        test.__name__, test.__doc__, test.__module__ = play.__name__, play.__doc__, play.__module__
        test.play, test.order = play, order  # type: ignore[attr-defined]
        fixtures = (p for n, p in inspect.signature(test).parameters.items() if n in FIXTURES)
        cases = [*inspect.signature(play).parameters.values()][1:]
        test.__signature__ = inspect.Signature([*fixtures, *cases])  # type: ignore[attr-defined]
        return pytest.mark.timeout(3000)(test)

    return decorate


FIXTURES = ("scenes", "request")


class Scenes:
    """The scenes of the selected tests, played; `outcomes` has that of each by the test's id."""

    def __init__(self, stage: SceneBench, items: list[pytest.Item]) -> None:
        self.stage = stage
        self.outcomes: dict[str, Future[None]] = {}
        items = sorted(items, key=lambda item: item.function.order)
        try:
            for alone, count in ((False, AT_A_TIME), (True, 1)):
                with ThreadPoolExecutor(count) as pool:
                    chosen = [item for item in items if (item.function.order == ALONE) == alone]
                    started = {item.nodeid: pool.submit(self._play, item) for item in chosen}
                    self.outcomes |= started
                    try:
                        wait(started.values())
                    except BaseException:
                        stage.is_over.set()
                        raise
        finally:
            stage.__exit__()

    def _play(self, item: Any) -> None:
        began, result = time.monotonic(), "failed"
        try:
            case = item.callspec.params if hasattr(item, "callspec") else {}
            item.function.play(self.stage, **case)
            result = "passed"
        finally:
            self.stage.clear(result == "failed")
            line = f"{result} after {time.monotonic() - began:.0f} s: {item.name}"
            # Not to the output of a verb that another thread runs in this process.
            print(line, file=sys.__stdout__, flush=True)


def scenes_of(session: pytest.Session) -> list[pytest.Item]:
    """The selected tests that are scenes and are not skipped."""
    return [
        item
        for item in session.items
        if hasattr(getattr(item, "function", None), "play")
        and item.get_closest_marker("skip") is None
    ]


def process_of(run: Path, argument: str, rank: int | None = None, but: str = "-c") -> int:
    """The id on this machine of a process of a run, by an argument and its rank.

    Args:
        but: An argument that it has not.
    """
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            arguments = (entry / "cmdline").read_text(errors="replace").split("\0")
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        is_of_run = argument in arguments and but not in arguments and str(run) in arguments
        if is_of_run and (rank is None or b"RANK=%d" % rank in variables):
            return int(entry.name)
    raise AssertionError(f"no process {argument} of {run} with rank {rank}")


def worker_of(run: Path, rank: int) -> int:
    """The id on this machine of a worker of ours."""
    return process_of(run, "worker", rank)
