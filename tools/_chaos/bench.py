"""A development cluster with a shared directory, and the command line in it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _devcluster.cluster import Cluster
from _devcluster.errors import Fault

DEVCLUSTER = Path(__file__).resolve().parent.parent / "devcluster"
SLURMLLM = (sys.executable, "-m", "slurmllm")
SHARED_MB = 256
NODE_DISK_MB = 2048  # sparse; preflight requires a free GB
SPARE_NODES = 2


class ChaosError(Exception):
    """The suite itself failed."""


@dataclass(frozen=True)
class Setup:
    """The settings of every run of the suite."""

    backend: str  # `native` or `rehearsal`
    nodes: int  # of a run; the cluster has SPARE_NODES more
    steps: int
    every: int  # steps between checkpoints
    inputs: tuple[str, ...]  # `--set` options that name corpus and tokenizer
    limit_s: float  # after which a run counts as lost
    dbd_away_s: float  # for which slurmdbd is away

    def options(self) -> tuple[str, ...]:
        """The `--set` options of a run; small, so that its time is mostly start-up."""
        values = {
            "backend": self.backend,
            "model.num_layers": 1,
            "model.hidden_size": 32,
            "model.num_heads": 2,
            "model.ffn_hidden_size": 64,
            "model.seq_len": 32,
            "train.steps": self.steps,
            "train.global_batch": self.nodes,
            "train.micro_batch": 1,
            "train.compile": "false",
            "train.log_every": 20,
            "data.num_workers": 0,
            "checkpoint.every_steps": self.every,
            "checkpoint.asynchronous": "true",
            "optim.warmup_steps": 4,
            "slurm.no_progress_limit": 12,
            "slurm.failure_budget": 50,
            "slurm.hang_budget": 20,
            "slurm.storage_budget": 50,
            "slurm.backoff_s": 1,
            "watchdog.start_up_s": 60 if self.nodes <= 8 else 300,
            "watchdog.first_step_s": 60,
            "watchdog.min_step_s": 12 if self.nodes <= 8 else 60,
            "watchdog.save_s": 30,
            "env.OMP_NUM_THREADS": 1,
            # Steps long enough to inject a failure between two of them.
            "env.SLURMLLM_REHEARSAL_STEP_S": 0.1,
        }
        return tuple(f"--set={path}={value}" for path, value in values.items())


class Bench:
    """One cluster, for one run at a time; its shared directory is next to its state directory."""

    def __init__(self, root: Path, setup: Setup) -> None:
        self.root, self.setup = root, setup
        self.shared = root.with_name(f"{root.name}-shared")
        self.runs = self.shared / "runs"
        self.cluster = Cluster(root)
        outside = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH"))}
        path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
        self.env = {**outside, "PATH": path, "SLURM_CONF": str(root / "slurm.conf")}

    def up(self) -> None:
        timeout_s = 5 if self.setup.nodes <= 8 else 30  # a hundred slurmds respond late
        self.tool(
            "up",
            f"--nodes={self.setup.nodes + SPARE_NODES}",
            f"--slurmd-timeout={timeout_s}",
            "--kill-wait=30",
            f"--shared={self.shared}",
            f"--shared-mb={SHARED_MB}",
            "--network",
            *(("--clock",) if shutil.which("cc") else ()),
            # In every node's namespace is a mount of every disk: too many for a hundred nodes.
            *((f"--node-disk-mb={NODE_DISK_MB}",) if self.setup.nodes <= 8 else ()),
        )

    def down(self) -> None:
        if (self.root / "cluster.json").exists():
            self.tool("down")
        shutil.rmtree(self.shared, ignore_errors=True)

    def tool(self, *arguments: str) -> str:
        """Run a verb of devcluster; returns its output."""
        return self._call([sys.executable, str(DEVCLUSTER), *arguments, f"--dir={self.root}"])

    def tool_beside(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Run a slow verb in a process of its own."""
        return subprocess.Popen(
            [sys.executable, str(DEVCLUSTER), *arguments, f"--dir={self.root}"],
            env=self.env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def submit(self, name: str, env: Mapping[str, str]) -> str:
        """Submit a run, with further variables; returns the id of its train job."""
        printed = self._call(
            [
                *SLURMLLM,
                "submit",
                "tiny_neox",
                f"--nodes={self.setup.nodes}",
                f"--name={name}",
                *self.setup.options(),
                *self.setup.inputs,
                f"--runs-dir={self.runs}",
                "--json",
            ],
            env,
        )
        return str(json.loads(printed)["jobs"]["train"])

    def slurm(self, *command: str) -> str | None:
        """Output of a Slurm command; None if it fails, as while slurmctld is down."""
        done = subprocess.run(command, env=self.env, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else None

    def in_queue(self, job: str) -> bool | None:
        """Whether a job is in Slurm's queue; None if Slurm does not respond."""
        done = subprocess.run(
            ["squeue", "--noheader", "--jobs", job, "--format=%T"],
            env=self.env,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            return False if "Invalid job id" in done.stderr else None
        return done.stdout.strip() not in ("", "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")

    def repair(self) -> None:
        """Restore the cluster after a run: nodes, slurmctld, the shared directory, no jobs."""
        cluster = self.cluster
        for state in ("writable", "free"):
            cluster.shared_states()[state]()
        for _ in range(6):
            for daemon, options in (("slurmctld", ()), ("slurmdbd", ("--database",))):
                if not cluster.processes.named(daemon):
                    self.tool("restart", "--start", *options)
            self.slurm("scancel", "--user=root")
            states, off = cluster.slurm_states(), cluster.directory.slurmd_off
            bad = [node for node in states if cluster.power(node) != "on" or off(node).exists()]
            down = [node for node, state in states.items() if state != "idle"]
            if not bad and not down:
                return
            for healing in [self.tool_beside("heal", node) for node in bad]:
                healing.wait()
            with suppress(Fault):  # in the next round, nodes are healed again
                for node in down:
                    cluster.wait_in_service(node, since=0.0)
                cluster.wait_idle(30)
        raise ChaosError(f"the cluster in {self.root} cannot be restored: {bad} {down}")

    def _call(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> str:
        env = {**self.env, **(env or {})}
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        if done.returncode:
            output = (done.stderr or done.stdout).strip()
            raise ChaosError(f"{' '.join(command[:6])} …: exit {done.returncode}: {output}")
        return done.stdout


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a record; None if it is missing or, on a full disk, incomplete."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return None
