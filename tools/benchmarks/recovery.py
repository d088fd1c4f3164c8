"""Ten failures on a real Slurm of 16 nodes, under slurmllm and under a loop of sbatch.

    python tools/benchmarks/recovery.py [--system ours|spare|loop]… [--failures worker,node,…]

Both run the same trainer (`_recovery/trainer.py`, no torch) on 14 of 16 nodes of a development
cluster with Slurm's own times (SlurmdTimeout 300 s, cred_expire 120 s); the collectives' time-out
is that of NCCL in torch, 600 s. `spare` is slurmllm with one spare node. A failure comes 15 to 25
steps after the recovery from the one before:

    worker   SIGKILL of a rank             hang   a rank sleeps
    node     a node loses its power        slow   SIGKILL of a rank; slurmctld is away for 60 s
    bad      a node fails now and at each start, with the text of a lost GPU

A bad node that the system does not exclude within PATIENCE_S is then excluded by hand.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parents[1]
HERE = Path(__file__).with_name("_recovery")
KINDS = ("worker", "node", "bad", "hang", "slow")
NODES, CLUSTER_NODES = 14, 16
STEP_S, COLLECTIVE_TIMEOUT_S = 0.5, 600
AWAY_S = 60.0
PATIENCE_S = 900.0  # until an engineer acts, if a run does not continue
BAD_TEXT = "RuntimeError: CUDA error: uncorrectable ECC error encountered\n"
POLL_S = 0.25


@dataclass
class Outcome:
    """What one failure cost."""

    system: str
    kind: str
    victim: str
    to_next_step_s: float | None  # None: not within PATIENCE_S
    steps_lost: int
    node_hours: float  # held by jobs from the failure until the lost steps are recomputed
    blamed: list[str]
    excluded: list[str]
    starts: int  # of the trainer on the first node


class Bench:
    """A cluster, its shared folder, and the system that runs the trainer on it."""

    def __init__(self, system: str, root: Path) -> None:
        self.system, self.root = system, root
        self.folder = root.with_name(f"{root.name}-shared")
        self.out = self.folder / ("runs/ours/outputs" if system != "loop" else "outputs")
        outside = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH"))}
        self.env = {
            **outside,
            "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
            "SLURM_CONF": str(root / "slurm.conf"),
            "SLURMLLM_CONFIG": str(root / "none.yaml"),
        }
        self.held = 0.0  # node seconds
        self._sampled = time.monotonic()

    def tool(self, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(TOOLS / "devcluster"), *arguments, f"--dir={self.root}"]
        return subprocess.Popen(command, env=self.env, stdout=subprocess.DEVNULL)

    def call(self, *command: str) -> str:
        done = subprocess.run(command, env=self.env, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    @contextmanager
    def up(self) -> Iterator[None]:
        self.folder.mkdir(parents=True)
        times = ("--slurmd-timeout=300", "--cred-expire=120", "--kill-wait=30")
        started = self.tool("up", f"--nodes={CLUSTER_NODES}", "--network", *times)
        try:
            if started.wait():
                raise SystemExit(f"the cluster in {self.root} did not start")
            yield
        finally:
            self.tool("down").wait()

    def start(self, steps: int) -> subprocess.Popen[bytes]:
        trainer = f"{sys.executable} {HERE / 'trainer.py'}"
        arguments = f"{steps} {STEP_S} {COLLECTIVE_TIMEOUT_S}"
        command: list[str] = [str(HERE / "loop.sh"), str(NODES), str(self.folder)]
        command += [*trainer.split(), str(self.out), *arguments.split()]
        if self.system != "loop":
            recipe = self.folder / "ours.yaml"
            recipe.write_text(
                "name: ours\nextends: trainers/plain\ncommand:\n"
                f'  run: {trainer} "{{run}}/outputs" {arguments}\n'
                '  checkpoints: "{run}/outputs/step-{step}.ckpt"\n'
                f"  steps: {steps}\n"
            )
            spares = f"slurm.spare_nodes={int(self.system == 'spare')}"
            submit = (sys.executable, "-m", "slurmllm", "submit", str(recipe), f"--nodes={NODES}")
            options = ("--name=ours", f"--runs-dir={self.folder / 'runs'}", "--set", spares)
            command = [*submit, *options, "--time=1-0"]
        return subprocess.Popen(command, env=self.env, stdout=sys.stderr)

    def steps(self) -> list[tuple[float, int, str]]:
        """Time, number and start of each completed step."""
        try:
            lines = (self.out / "steps").read_text().splitlines()
        except FileNotFoundError:
            return []
        rows = (line.split() for line in lines if line.count(" ") == 2)
        return [(float(at), int(step), start) for at, step, start in rows]

    def sample(self) -> None:
        """Add the node seconds that jobs have held since the last sample."""
        now = time.monotonic()
        if now - self._sampled > 1:
            states = ("--states=RUNNING,COMPLETING,CONFIGURING", "--format=%D")
            count = sum(map(int, self.call("squeue", "--noheader", *states).split()))
            self.held += count * (now - self._sampled)
            self._sampled = now

    def wait(self, condition: Any, limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > deadline:
                return False
            self.sample()
            time.sleep(POLL_S)
        return True

    def nodes(self) -> list[str]:
        """The nodes that train now, without a spare one; the first of the job's first."""
        listed = self.call("squeue", "--noheader", "--states=RUNNING", "--format=%N")
        held = self.call("scontrol", "show", "hostnames", listed.splitlines()[0]).split()
        paths = sorted((self.out / "started").iterdir(), key=_time)[-NODES:]
        started = {path.name.rpartition("-")[0] for path in paths}
        return [node for node in held if node in started]

    def blamed(self, since: float) -> list[str]:
        """The nodes that the attempts which ended since then blame."""
        if self.system == "loop":
            return []
        names = set()
        for path in (self.out.parent / "attempts").glob("*/attempt.json"):
            record = json.loads(path.read_text())
            if (record.get("ended_at") or 0) > since:
                names.update(record["blamed_nodes"])
        return sorted(names)

    def excluded(self) -> list[str]:
        """The nodes that later jobs exclude."""
        if self.system == "loop":
            with suppress(FileNotFoundError):
                return (self.folder / "cordoned").read_text().split()
            return []
        with suppress(FileNotFoundError):
            record = json.loads((self.out.parent / "excluded.json").read_text())
            return sorted(node["node"] for node in record["nodes"])
        return []

    def fail(self, kind: str, seed: int) -> Outcome:
        chance = random.Random(seed)
        last = self.steps()[-1][1]
        self.wait(lambda: self.steps()[-1][1] >= last + chance.randint(15, 25), PATIENCE_S)
        victim = chance.choice(self.nodes()[1:])
        began, held, undo = time.time(), self.held, []
        if kind == "node":
            failing = self.tool("fail", victim)
            undo.append(("heal", victim))
        else:
            if kind == "bad":
                (self.out / "bad").mkdir(exist_ok=True)
                (self.out / "bad" / victim).write_text(BAD_TEXT)
            (self.out / "fault").write_text(f"{kind} {victim}\n")
            self.wait(lambda: not (self.out / "fault").exists(), 60)
            began = time.time()
        reached, start = [row for row in self.steps() if row[0] <= began][-1][1:]
        if kind == "slow":
            self.tool("restart", "--stop").wait()
            undo.append(("restart", "--start"))

        def after() -> list[tuple[float, int, str]]:
            return [row for row in self.steps() if row[0] > began and row[2] != start]

        if kind == "slow":
            self.wait(lambda: False, AWAY_S - (time.time() - began))
            self.tool(*undo.pop()).wait()
        recovered = self.wait(after, PATIENCE_S)
        if not recovered:  # what an engineer does
            (self.out / "bad" / victim).unlink(missing_ok=True)
            with (self.folder / "cordoned").open("a") as file:
                file.write(f"{victim}\n")
            self.wait(after, PATIENCE_S)
        first = after()[0]
        self.wait(lambda: after()[-1][1] >= reached, PATIENCE_S)
        outcome = Outcome(
            self.system,
            kind,
            victim,
            first[0] - began if recovered else None,
            max(0, reached - first[1] + 1),
            (self.held - held) / 3600,
            self.blamed(began),
            self.excluded(),
            sum(1 for path in (self.out / "started").iterdir() if _time(path) > began) // NODES,
        )
        (self.out / "bad" / victim).unlink(missing_ok=True)
        if kind == "node":
            failing.wait()
        for arguments in undo:
            self.tool(*arguments).wait()
        return outcome


def _time(started: Path) -> float:
    return float(started.name.rpartition("-")[2])


def main() -> None:
    options = _options()
    outcomes = []
    for system in options.system:
        root = Path(options.dir) / system
        bench = Bench(system, root)
        with bench.up():
            process = bench.start(steps=100_000)
            try:
                if not bench.wait(bench.steps, PATIENCE_S):
                    raise SystemExit(f"{system}: no step in {PATIENCE_S:.0f} s")
                for seed, kind in enumerate(options.failures):
                    outcomes.append(bench.fail(kind, seed))
                    print(json.dumps(asdict(outcomes[-1])), flush=True)
            finally:
                process.kill()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(10)
        if not options.keep:
            shutil.rmtree(bench.folder)
    _print(outcomes)


def _print(outcomes: list[Outcome]) -> None:
    print("\n| failure | system | s to the next step | steps lost | node hours | blamed |")
    print("|---|---|---|---|---|---|")
    for kind in (*KINDS, "all"):
        for system in dict.fromkeys(outcome.system for outcome in outcomes):
            rows = [o for o in outcomes if o.system == system and kind in (o.kind, "all")]
            if not rows:
                continue
            times = [o.to_next_step_s or float("inf") for o in rows]
            lost = [o.steps_lost for o in rows]
            right = sum(o.blamed == [o.victim] for o in rows)
            wrong = sum(bool({*o.blamed} - {o.victim}) for o in rows)
            hours = [o.node_hours for o in rows]
            print(
                f"| {kind} | {system} | {_range(times, '.0f')} | {_range(lost, '.0f')} "
                f"| {_range(hours, '.2f')} | {right} right, {wrong} wrong of {len(rows)} |"
            )


def _range(values: list[float] | list[int], form: str) -> str:
    """Median and worst."""
    return f"{statistics.median(values):{form}}; {max(values):{form}}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--system", action="append", choices=("ours", "spare", "loop"))
    parser.add_argument("--failures", default=",".join(KINDS * 2))
    parser.add_argument(
        "--dir",
        default=f"{tempfile.gettempdir()}/slurmllm-recovery",
        help="of clusters and outputs",
    )
    parser.add_argument("--keep", action="store_true", help="keep the runs")
    options = parser.parse_args()
    options.system = options.system or ["loop", "ours", "spare"]
    options.failures = options.failures.split(",")
    return options


if __name__ == "__main__":
    main()
