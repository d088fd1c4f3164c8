"""The calls of a worker on the shared file system, and its start, with and without staging.

    python tools/benchmarks/staging.py [--backend native] [--steps 3] [--json] [--folder DIR]

Runs a small recipe with --local on two nodes: from the shared environment, and from the staged one
that an earlier run has put onto the nodes. Each is run once for its time and once under strace.
Counted are the system calls of a worker, its data workers included, that name a path under a
shared prefix or work on a file opened there: this environment and its base interpreter, the
checkout, the data, the checkpoint that a run ends with, the rest of its folder. `other` are those
under the home folder. The time includes the listing of the environment's files, which a run with
checks of its nodes does meanwhile. Needs strace.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import slurmllm
from slurmllm.corpus.builtin import ensure_stdlib

CHECKOUT = Path(slurmllm.__file__).resolve().parent.parent
SMALL = (
    "--set=model.num_layers=2", "--set=model.hidden_size=64", "--set=model.num_heads=4",
    "--set=model.ffn_hidden_size=256", "--set=model.seq_len=128", "--set=train.compile=false",
    "--set=optim.warmup_steps=1", "--set=cluster.health.enabled=false",
    "--set=checkpoint.every_steps=1000",
)  # fmt: skip
# seccomp: only the traced calls stop the process.
STRACE = ("strace", "-ff", "--seccomp-bpf", "-qq", "-y", "-s", "4096", "-e", "signal=none",
          "-e", "trace=%file,%desc,clone,clone3,fork,vfork")  # fmt: skip
TRACED = ("shared_traced", "staged_traced")
_NAMED = re.compile(r'"(/[^"]*)"|<(/[^>]*)>')
# strace shows the working directory, which an absolute path does not depend on.
_FROM_FOLDER = re.compile(r'\w+<[^>]*>, "/')
# What is read or written is no path.
_CONTENT = re.compile(r'^(p?(?:read|write)(?:64)?\(\d+<[^>]*>), ".*')
_CHILD = re.compile(r"^(?:clone3?|v?fork)\(.* = (\d+)(?:<.*>)?$")


def shared_prefixes(folder: Path) -> dict[str, tuple[str, ...]]:
    """What is on a shared file system in the field: kind → beginnings of paths."""
    paths = {os.path.realpath(path) for path in sys.path if path}
    python = {*paths, sys.prefix, sys.base_prefix, str(CHECKOUT)}
    return {
        "checkpoint": tuple(f"{folder / 'runs' / name}/checkpoints/" for name in TRACED),
        "run directory": (f"{folder / 'runs'}/",),
        "data": (f"{folder / 'data'}/",),
        "environment": tuple(sorted(p for p in python if not p.startswith("/usr"))),
        "other": (f"{Path.home()}/",),
    }


def workers(logs: Path) -> Iterator[list[Path]]:
    """The traces of each worker of a train attempt, one for each of its processes and threads."""
    children: dict[str, list[str]] = defaultdict(list)
    roots = []
    for log in logs.iterdir():
        number = log.suffix[1:]
        with log.open(errors="replace") as lines:
            for line in lines:
                if match := _CHILD.match(line.rstrip()):
                    children[number].append(match[1])
                elif line.startswith("execve(") and '"worker"' in line and '"train"' in line:
                    roots.append(number)
    for root in roots:
        found, waiting = [], [root]
        while waiting:
            number = waiting.pop()
            waiting += children[number]
            found.append(logs / f"trace.{number}")
        yield [log for log in found if log.is_file()]


def count_calls(logs: list[Path], prefixes: dict[str, tuple[str, ...]]) -> Counter[str]:
    found: Counter[str] = Counter()
    for log in logs:
        with log.open(errors="replace") as lines:
            for line in lines:
                if line.startswith("execve("):
                    line = line.partition(", [")[0]  # its arguments are no files that it opens
                elif line.startswith("getcwd("):
                    continue  # the kernel answers
                line = _FROM_FOLDER.sub('"/', _CONTENT.sub(r"\1", line))
                paths = [first or second for first, second in _NAMED.findall(line)]
                for kind, starts in prefixes.items():
                    if any(path.startswith(starts) for path in paths):
                        found[kind] += 1
                        break
    return found


class Bench:
    """Runs in a folder of their own."""

    def __init__(self, folder: Path, backend: str, steps: int) -> None:
        self.folder, self.backend, self.steps = folder, backend, steps
        corpus, tokenizer = ensure_stdlib(folder / "data")
        self.inputs = (f"--set=data.corpus={corpus}", f"--set=data.tokenizer={tokenizer}")
        self.node = folder / "node"
        self.node.mkdir(exist_ok=True)

    def run(self, name: str, staged: bool, tracer: tuple[str, ...] = ()) -> None:
        done = subprocess.run(
            [*tracer, sys.executable, "-P", "-m", "slurmllm", "submit", "tiny_neox", "--nodes=2",
             "--local", *SMALL, *self.inputs, f"--set=backend={self.backend}", f"--name={name}",
             f"--set=train.steps={self.steps}", f"--set=cluster.node_local={self.node}",
             f"--set=cluster.stage_environment={str(staged).lower()}",
             "--runs-dir", str(self.folder / "runs")],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        for path in (self.folder / "runs" / name / "attempts/000/nodes").iterdir():
            record = json.loads(path.read_text())
            if (record["environment_source"] == "staged") is not staged:
                raise SystemExit(f"{name}: {record['environment_reason']}")

    def first_step_s(self, name: str) -> float:
        """From the start of the train attempt to the end of its first step."""
        run = self.folder / "runs" / name
        began = json.loads((run / "attempts/000/attempt.json").read_text())["started_at"]
        first = json.loads((run / "metrics/attempt_000.jsonl").read_text().splitlines()[0])
        return float(first["time"]) - float(began)

    def trace(self, name: str, staged: bool) -> dict[str, Counter[str]]:
        """The calls of the workers."""
        logs = self.folder / f"{name}.trace"
        logs.mkdir()
        self.run(name, staged, (*STRACE, "-o", str(logs / "trace")))
        prefixes = shared_prefixes(self.folder)
        counts = [count_calls(files, prefixes) for files in workers(logs)]
        shutil.rmtree(logs)
        counts.sort(key=lambda count: count["run directory"])
        return {"another worker": counts[0], "rank 0": counts[-1]}  # that one writes the metrics


def main() -> None:
    """Run and trace from both environments; print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="native")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--folder", type=Path, help="for the runs; a temporary one by default")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        bench = Bench(Path(folder), arguments.backend, arguments.steps)
        bench.run("first", staged=True)
        for name, staged in (("shared", False), ("staged", True)):
            bench.run(name, staged)
            calls = bench.trace(f"{name}_traced", staged)
            seconds = round(bench.first_step_s(name), 2)
            rows += [
                {"environment": name, "worker": role, "calls": dict(count), "first_step_s": seconds}
                for role, count in sorted(calls.items())
            ]
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    kinds = tuple(shared_prefixes(Path()))
    print(f"{'environment':<12}{'':<15}" + "".join(f"{kind:>15}" for kind in kinds)
          + "  first step, s")  # fmt: skip
    for row in rows:
        counted = row["calls"]
        assert isinstance(counted, dict)
        counts = "".join(f"{counted.get(kind, 0):>15,}" for kind in kinds)
        print(f"{row['environment']:<12}{row['worker']:<15}{counts}  {row['first_step_s']:>13}")


if __name__ == "__main__":
    main()
