"""Runs and workers for tests: a small recipe, and processes started as a launcher starts them."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slurmllm.core.config.resolve import RunConfig, resolve
from slurmllm.core.run.rundir import RunDir, Stage
from slurmllm.data.corpus.build import build_corpus
from slurmllm.data.corpus.inputs import find_inputs
from slurmllm.data.corpus.readers import ReadOptions
from slurmllm.data.tokenizer import train_tokenizer
from slurmllm.train.control.plane import SOCKET, ControlPlane
from slurmllm.train.control.relay import Position, Relay
from slurmllm.train.control.rendezvous import SECRET, new_secret
from train.forked import Forked

_ENTRY = """
import os, resource, sys
from pathlib import Path
if limit := int(os.environ.get("TEST_FILE_SIZE_LIMIT", 0)):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
from slurmllm.core.run.rundir import RunDir
from slurmllm.train.worker import run_worker
sys.exit(run_worker(RunDir(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3])))
"""
# Adam's epsilon is above the rounding of gradients (see mesh_pool.py).
_SMALL = (
    *("model.num_layers=2", "model.hidden_size=64", "model.num_heads=4"),
    *("model.ffn_hidden_size=128", "model.vocab_size=512", "model.seq_len=32"),
    *("train.global_batch=8", "train.micro_batch=2", "train.compile=false"),
    *("data.num_workers=0", "optim.warmup_steps=4", "checkpoint.keep=3"),
    "optim.eps=1e-5",
)


def make_data(folder: Path) -> tuple[str, str]:
    """A corpus of a few hundred made-up documents, and its tokenizer."""
    rng = random.Random(7)
    roots, endings = ("the", "of", "and", "to", "in"), ("", "s", "ing", " be")
    words = [root + ending for root in roots for ending in endings]
    texts = [" ".join(rng.choices(words, k=rng.randint(5, 120))) for _ in range(300)]
    source = folder / "texts.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    build_corpus(find_inputs([str(source)]), folder / "corpus.arrow", ReadOptions())
    (folder / "tokenizer.json").write_text(train_tokenizer(texts, 400))
    return str(folder / "corpus.arrow"), str(folder / "tokenizer.json")


def small_config(*overrides: str, data: tuple[str, str] | None = None) -> RunConfig:
    inputs = [f"data.corpus={data[0]}", f"data.tokenizer={data[1]}"] if data else []
    return resolve("tiny_neox", "local", [*_SMALL, *inputs, *overrides])


def make_run(folder: Path, data: tuple[str, str], *overrides: str) -> RunDir:
    """A run directory as `submit` leaves it."""
    folder.mkdir(parents=True)
    run = RunDir(folder)
    run.config.write_text(small_config(*overrides, data=data).to_yaml())
    return run


def open_relay(workers: int, secret: Mapping[str, str]) -> Relay:
    """The control plane of the workers of one node, as its launcher starts it."""
    folder = Path(tempfile.mkdtemp(prefix="slurmllm-test-"))  # short: a path of a Unix socket
    position = Position(0, ("node-0",), workers)
    relay = Relay(position, folder / "control", ("127.0.0.1", 0), secret[SECRET].encode())
    relay.start()
    return relay


@contextmanager
def control_planes(workers: int) -> Iterator[list[ControlPlane]]:
    """The ends of several workers of one node, for threads of a test."""
    secret = new_secret()
    relay = open_relay(workers, secret)
    ends = []
    try:
        for rank in range(workers):
            ends.append(ControlPlane(rank, workers, str(relay.path), secret[SECRET].encode()))
        yield ends
    finally:
        for end in ends:
            end.close()
        relay.close()
        relay.path.parent.rmdir()


def _start(
    entry: str, argv: tuple[str, ...], env: dict[str, str], log: Path
) -> Forked | subprocess.Popen[bytes]:
    folders = [
        Path(folder_path)
        for folder_path in env.get("PYTHONPATH", "").split(os.pathsep)
        if folder_path
    ]
    if not any((folder / "sitecustomize.py").is_file() for folder in folders):
        return Forked(entry, argv, env, folders, log)
    with log.open("wb") as output:  # for NxD: variables and modules that precede torch
        return subprocess.Popen(
            [sys.executable, "-c", entry, *argv],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


class Gang:
    """The workers of one attempt."""

    def __init__(
        self,
        run: RunDir,
        world: int = 1,
        *,
        attempt: int = 0,
        stage: Stage = "train",
        env: Mapping[str, str] | None = None,
        entry: str = _ENTRY,
    ) -> None:
        self.run, self.attempt, self.stage = run, attempt, stage
        logs = run.path / "logs"
        logs.mkdir(exist_ok=True)
        self.logs = [logs / f"{stage}_{attempt}_{rank}.log" for rank in range(world)]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.processes: list[Forked | subprocess.Popen[bytes]] = []
        secret = new_secret()
        self._relay = open_relay(world, secret)
        for rank, log in enumerate(self.logs):
            variables = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                SOCKET: str(self._relay.path),
                "SLURMLLM_NODE": "node-0",
                "PYTHONUNBUFFERED": "1",
            }
            argv = (str(run.path), stage, str(attempt))
            process = _start(entry, argv, {**os.environ, **secret, **variables, **(env or {})}, log)
            self.processes.append(process)

    def wait(self, timeout_s: float = 600) -> list[int]:
        """The exit codes by rank; workers that do not end in time are killed and fail the test."""
        deadline = time.monotonic() + timeout_s
        try:
            return [p.wait(max(0.1, deadline - time.monotonic())) for p in self.processes]
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"workers hang:\n{self.output()}") from error
        finally:
            for process in self.processes:
                process.kill()
                process.wait()
            self._relay.close()
            self._relay.path.parent.rmdir()

    def finish(self) -> RunDir:
        """Wait for success."""
        assert self.wait() == [0] * len(self.processes), self.output()
        return self.run

    def signal_at(self, step: int, number: signal.Signals, ranks: list[int]) -> None:
        """Send a signal to some workers as soon as the metrics show a step."""
        deadline = time.monotonic() + 300
        while not (written := rows(self.run, self.attempt)) or written[-1]["step"] < step:
            assert time.monotonic() < deadline, self.output()
            assert self.processes[0].poll() is None, self.output()
            time.sleep(0.002)
        for rank in ranks:
            self.processes[rank].send_signal(number)

    def output(self, rank: int | None = None) -> str:
        logs = self.logs if rank is None else [self.logs[rank]]
        return "\n".join(log.read_text(errors="replace") for log in logs)


def rows(run: RunDir, attempt: int) -> list[dict[str, Any]]:
    """The complete metrics rows of an attempt."""
    path = run.metrics(attempt)
    if not path.is_file():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def curve(run: RunDir, *attempts: int) -> dict[int, tuple[float, float, float]]:
    """Step → (loss, gradient norm, parameter norm), later attempts winning."""
    return {
        row["step"]: (row["loss"], row["grad_norm"], row["param_norm"])
        for attempt in attempts or (0,)
        for row in rows(run, attempt)
    }
