"""Runs as a user starts them: the real command line, real workers, a small corpus."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from slurmllm.cli.main import cli

SLURMLLM = (sys.executable, "-P", "-m", "slurmllm")
# The model is small, so a run takes little more than its start-up. A step still takes long enough
# that a test which waits for it sees it before the run ends.
SMALL = (
    "--set=model.num_layers=2",
    "--set=model.hidden_size=64",
    "--set=model.num_heads=4",
    "--set=model.ffn_hidden_size=256",
    "--set=model.seq_len=128",
    "--set=train.steps=40",
    "--set=checkpoint.every_steps=10",
    "--set=train.log_every=5",
)

# Everything but the arithmetic, in steps that wait instead of computing: for tests of what happens
# around the training. Without a process that reads ahead, which takes as long to start as a worker.
REHEARSED = (
    "--set=backend=rehearsal",
    "--set=env.SLURMLLM_REHEARSAL_STEP_S=0.25",
    "--set=data.num_workers=0",
)
# Nor a preflight, on this machine.
LEAN = (
    *REHEARSED,
    "--set=env.SLURMLLM_REHEARSAL_STEP_S=0.05",
    "--set=cluster.health.enabled=false",
)
# For a fault that a command makes, which takes seconds on a busy machine: before the run ends.
SLOWLY = (*LEAN, "--set=env.SLURMLLM_REHEARSAL_STEP_S=0.5")

# How long a test waits for what must happen at all; how fast it happens is no test's business, for
# the machine may have other work.
PATIENCE_S = 400.0
# Verbs that start no processes.
_ALONE = ("status", "logs", "report", "compare", "cancel")


def run_verb(arguments: list[str], environment: dict[str, str], folder: str) -> Result:
    """Run a verb in this process, with the variables and in the folder of the one that asks."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    result = CliRunner().invoke(cli, arguments)
    output = result.output_bytes
    if result.exc_info is not None and not isinstance(result.exception, SystemExit):
        output += "".join(traceback.format_exception(*result.exc_info)).encode()
    streams = (result.stdout_bytes, result.stderr_bytes, output)
    return Result(result.runner, *streams, None, result.exit_code, None)  # what can be sent


class Bench:
    """The command line in a folder of runs."""

    patience_s = PATIENCE_S

    def __init__(self, runs: Path) -> None:
        self.runs = runs
        self.started: list[subprocess.Popen[str]] = []
        self.is_over = threading.Event()  # whether what waits in other threads gives up
        runs.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        """End what a failed test left running: it would disturb the tests after it."""
        for process in self.started:
            with process:  # closes its pipe, and waits
                process.kill()

    def in_runs(self, *arguments: str) -> list[str]:
        """Return the arguments with the folder of runs."""
        end = arguments.index("--") if "--" in arguments else len(arguments)
        return [*arguments[:end], "--runs-dir", str(self.runs), *arguments[end:]]

    def start(self, *arguments: str, env: Mapping[str, str] = {}) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*SLURMLLM, *self.in_runs(*arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **env},
        )
        self.started.append(process)
        return process

    def call(self, *arguments: str, code: int = 0, env: Mapping[str, str] | None = None) -> str:
        """Return all that a verb prints, run in this process if it starts no others.

        A new process costs half a second of CPUs; with variables `env` it is one.
        """
        if arguments[0] in _ALONE and "-f" not in arguments and env is None:
            result = self.invoke(*arguments)
            returned, output = result.exit_code, result.output
        else:
            process = self.start(*arguments, env=env or {})
            output, _ = process.communicate(timeout=self.patience_s)
            returned = process.returncode
        assert returned == code, f"{returned}: {output}"
        return output

    def look(self, *arguments: str) -> str:
        """Return what a verb prints on stdout, run in this process."""
        result = self.invoke(*arguments)
        assert result.exit_code == 0, result.output
        return result.stdout

    def invoke(self, *arguments: str) -> Result:
        """Run a verb in this process."""
        return CliRunner().invoke(cli, self.in_runs(*arguments))

    def status(self, name: str) -> dict[str, Any]:
        return dict(json.loads(self.look("status", name, "--json")))

    def attempt(self, name: str, number: int) -> dict[str, Any]:
        path = self.runs / name / "attempts" / f"{number:03d}" / "attempt.json"
        return dict(json.loads(path.read_text()))

    def endings(self, name: str) -> list[tuple[str, str]]:
        return [(a["class"], a["action"]) for a in self.status(name)["attempts"]]

    def node(self, name: str, number: int, node: str) -> dict[str, Any]:
        folder = self.runs / name / "attempts" / f"{number:03d}" / "nodes"
        return dict(json.loads((folder / f"{node}.json").read_text()))

    def first_steps(self, name: str) -> dict[str, dict[str, Any]]:
        return dict(self.status(name)["first_steps"])

    def ended(self, name: str) -> bool:
        """Whether the newest attempt of a run has ended and nothing follows it.

        Reads the attempt records: `status` asks Slurm too, which takes CPUs that the run needs.
        """
        run = self.runs / name
        records = sorted(run.glob("attempts/*/attempt.json")) or sorted(
            run.glob("graphs/attempts/*/attempt.json")
        )
        if not records:
            return False
        newest = json.loads(records[-1].read_text())
        finished_precompile = records[-1].is_relative_to(run / "graphs") and (
            newest["action"] == "finish"
        )
        return (
            newest["ended_at"] is not None
            and newest["action"] not in ("restart", "requeue", "chain")
            and (not finished_precompile)
        )

    def wait_for_step(
        self, name: str, step: int, attempt: int = 0, timeout_s: float | None = None
    ) -> None:
        metrics = self.runs / name / "metrics" / f"attempt_{attempt:03d}.jsonl"
        self.until(
            lambda: metrics.is_file() and f'"step":{step},' in metrics.read_text(),
            f"attempt {attempt} of {name} made no step {step}",
            timeout_s,
        )

    def until(
        self,
        holds: Callable[[], bool],
        failure: str,
        timeout_s: float | None = None,
        every_s: float = 0.05,
    ) -> None:
        deadline = time.monotonic() + (timeout_s or self.patience_s)
        while not holds():
            assert time.monotonic() < deadline, failure
            assert not self.is_over.wait(every_s)

    def wait(self, name: str, *states: str) -> None:
        """Wait until a run has ended and `status` reports one of some states."""
        self.until(lambda: self.ended(name), f"{name} never ended", every_s=0.2)
        self.until(
            lambda: self.status(name)["state"] in states, f"{name} never {states}", every_s=1.0
        )

    def compare_exactly(self, first: str, second: str, steps: int = 40) -> dict[str, Any]:
        shown = dict(json.loads(self.look("compare", first, second, "--exact", "--json")))
        assert shown["verdict"] == "identical"
        assert shown["steps_compared"] == shown["last_step"] == steps
        assert (shown["only_in_a"], shown["only_in_b"]) == ([], [])
        return shown


class BenchOfThreads(Bench):
    """The command line for several threads: its verbs run one after the other, in one process.

    CliRunner replaces the streams of its whole process, so what a verb prints would be lost in
    another thread's.
    """

    def __init__(self, runs: Path) -> None:
        super().__init__(runs)
        self._verbs = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._verbs.shutdown(cancel_futures=True)

    def invoke(self, *arguments: str) -> Result:
        variables, folder = dict(os.environ), str(Path.cwd())
        return self._verbs.submit(run_verb, self.in_runs(*arguments), variables, folder).result()


def processes_with(text: str) -> list[int]:
    """The ids of processes whose command line contains a text."""
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if text.encode() in (entry / "cmdline").read_bytes():
                    pids.append(int(entry.name))
            except OSError:
                continue
    return pids
