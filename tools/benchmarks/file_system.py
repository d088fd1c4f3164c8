"""File system calls of a run by phase, process and number of nodes, counted by strace.

python tools/benchmarks/file_system.py [--nodes 2,4,8,16] [--workers 2] [--backend rehearsal]

Every size is a run of `submit --local` under strace and a `resume` of it after a stop. The phases:

    start   from the train stage's supervisor to the first step, without a checkpoint
    step    a step without a save: calls of the workers
    save    a synchronous save: calls of the workers
    resume  as start, from a checkpoint
    hour    3600 s of training without steps and saves: calls of launchers and supervisor, measured
            over --seconds and scaled

`seconds` is the time of the phase, or in which its events were counted: launchers and supervisor
look at files at intervals, so that a start which takes longer has more calls.

`run` counts calls on paths in the run directory, `data` on corpus and tokenizer, `python` on the
interpreter, site-packages and slurmllm itself. Counted are calls on paths (open, stat, rename and
others), listings, reads, writes and syncs; not counted are lseek, close, mmap, and calls on other
paths, such as the node's memory and its own disk. --source runs another version of slurmllm.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
PATIENCE_S = 900.0
SAVE_EVERY = 8  # steps
TRACED = (
    "%file,%process,getdents64,read,pread64,readv,preadv,write,pwrite64,writev,fsync,fdatasync,"
    "ftruncate,fchmod,fstat,flock"
)
PHASES = ("start", "step", "save", "resume", "hour")
ROLES = ("supervisor", "launcher", "rank 0", "worker")
AREAS = ("run", "data", "python")
# "1764036000.123456 openat(AT_FDCWD</tmp>, "x", O_RDONLY) = 3</tmp/x>"
_LINE = re.compile(r"^(?P<time>\d+\.\d+) (?P<call>\w+)\((?P<rest>.*)$")
_FD = re.compile(r"^(?:AT_FDCWD|\d+)<(?P<path>[^>]*)>(?:\(deleted\))?(?:, \"(?P<name>[^\"]*)\")?")
_CHILD = re.compile(r"^(?:clone3?|v?fork)$")
_NO_FILE = ("wait4", "waitid", "exit", "exit_group", "kill", "tgkill", "rt_sigqueueinfo")


@dataclass
class Process:
    """One traced process or thread."""

    parent: int | None = None
    role: str = ""  # by its command line; empty: its parent's
    began: float = 0.0  # Unix time of its command
    node: str = ""
    calls: list[tuple[float, str, str]] = field(default_factory=list)  # time, area, call


@dataclass(frozen=True)
class Areas:
    """Which folders count as what."""

    runs: str
    data: str
    python: tuple[str, ...]

    def of(self, path: str) -> str | None:
        for area, prefixes in (
            ("run", (self.runs,)),
            ("data", (self.data,)),
            ("python", self.python),
        ):
            if any(path == prefix or path.startswith(f"{prefix}/") for prefix in prefixes):
                return area
        return None


def path_of(rest: str) -> str:
    """The path that a call is about, by its first arguments."""
    if rest.startswith('"'):
        return rest[1:].partition('"')[0]
    found = _FD.match(rest)
    if found is None:
        return ""
    name = found["name"] or ""
    return name if name.startswith("/") else os.path.normpath(f"{found['path']}/{name}")


def role_of(rest: str) -> str:
    """The role of a command by the arguments of its execve."""
    if not re.search(r'"slurmllm(\.supervise\.workers)?"', rest):
        return "other"
    for verb, role in (("supervise", "supervisor"), ("launch", "launcher"), ("worker", "worker")):
        if f'"{verb}"' in rest:
            return role if '"train"' in rest else "other"
    return "other"


def read_traces(folder: Path, areas: Areas) -> dict[int, Process]:
    """All processes of the traces in a folder, by id."""
    found: defaultdict[int, Process] = defaultdict(Process)
    for trace in folder.glob("trace.*"):
        pid = int(trace.suffix[1:])
        process = found[pid]
        with trace.open(errors="replace") as stream:
            for line in stream:
                match = _LINE.match(line)
                if match is None:
                    continue
                at, call, rest = float(match["time"]), match["call"], match["rest"]
                if _CHILD.match(call):
                    if child := re.search(r"= (\d+)", rest):
                        found[int(child[1])].parent = pid
                    continue
                if call in _NO_FILE:
                    continue
                if call == "execve" and rest.rstrip().endswith("= 0"):
                    process.role, process.began = role_of(rest), at
                if (area := areas.of(path_of(rest))) is not None:
                    process.calls.append((at, area, call))
    return dict(found)


def role(processes: Mapping[int, Process], pid: int) -> tuple[str, int]:
    """The role of a process or thread, and the process whose command gives it that role."""
    while not processes[pid].role:
        parent = processes[pid].parent
        if parent is None or parent not in processes:
            return "other", pid
        pid = parent
    return processes[pid].role, pid


class Run:
    """One run at one size, traced."""

    def __init__(self, given: argparse.Namespace, folder: Path, nodes: int) -> None:
        self.given, self.folder, self.nodes = given, folder, nodes
        self.runs, self.path = folder / "runs", folder / "runs" / "traced"
        source = str(Path(given.source).resolve())
        self.environment = {**os.environ, "PYTHONPATH": source, "PYTHONDONTWRITEBYTECODE": "1"}
        prefixes = {sys.prefix, sys.base_prefix, sysconfig.get_paths()["stdlib"], source}
        prefixes |= {os.path.realpath(prefix) for prefix in prefixes} - {"/usr"}
        python = tuple(sorted(prefixes - {"/usr"} | {"/usr/lib", "/usr/local/lib", "/usr/bin"}))
        self.areas = Areas(str(self.runs), str(folder / "data"), python)
        (folder / "data").mkdir(exist_ok=True)

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-P", "-m", "slurmllm", *arguments, f"--runs-dir={self.runs}"]

    def traced(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a verb under strace; its output is in <name>.out."""
        folder = self.folder / name
        folder.mkdir()
        strace = ["strace", "-ff", "--seccomp-bpf", "-qq", "-y", "-ttt", "-s", "512", "-e",
                  f"trace={TRACED}", "-e", "signal=none", "-o", str(folder / "trace")]  # fmt: skip
        with (self.folder / f"{name}.out").open("wb") as output:
            return subprocess.Popen(
                [*strace, *self.command(*arguments)], env=self.environment, cwd=self.folder,
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def rows(self, attempt: int) -> dict[int, dict[str, Any]]:
        path = self.path / "metrics" / f"attempt_{attempt:03d}.jsonl"
        if not path.is_file():
            return {}
        whole = path.read_text().split("\n")[:-1]
        return {row["step"]: row for row in map(json.loads, whole)}

    def wait_for(
        self, process: subprocess.Popen[bytes], name: str, attempt: int, step: int
    ) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while max(self.rows(attempt), default=0) < step:
            if process.poll() is not None or time.monotonic() > deadline:
                text = (self.folder / f"{name}.out").read_text(errors="replace")
                raise SystemExit(f"{self.nodes} nodes: no step {step}\n{text[-4000:]}")
            time.sleep(0.2)

    def stop(self, process: subprocess.Popen[bytes]) -> None:
        """Have the run save and end."""
        done = subprocess.run(
            self.command("cancel", "traced"), env=self.environment, capture_output=True, check=False
        )
        if done.returncode != 0:
            process.send_signal(signal.SIGINT)
        process.wait(PATIENCE_S)

    def measure(self) -> list[dict[str, Any]]:
        """Run it; returns a row for each phase."""
        given = self.given
        step_s = 0.5 if given.backend == "rehearsal" else 0.2  # roughly, for the number of steps
        steps = SAVE_EVERY + 2 + int(given.seconds / step_s)
        settings = [
            f"backend={given.backend}", f"train.steps={10 * steps}", "train.compile=false",
            f"checkpoint.every_steps={SAVE_EVERY}", "checkpoint.asynchronous=false",
            f"env.SLURMLLM_REHEARSAL_STEP_S={step_s}", f"cluster.devices_per_node={given.workers}",
            f"train.global_batch={2 * self.nodes * given.workers}", "train.micro_batch=1",
            "model.num_layers=2", "model.hidden_size=64", "model.num_heads=4",
            "model.ffn_hidden_size=128", "model.seq_len=64", "train.log_every=1000",
            "data.num_workers=0", f"cluster.node_local={self.folder / 'disk'}", *given.set,
        ]  # fmt: skip
        (self.folder / "disk").mkdir(mode=0o755)
        corpus = self.corpus()
        process = self.traced(
            "start", "submit", "tiny_neox", f"--nodes={self.nodes}", "--local", "--name=traced",
            *(f"--set={setting}" for setting in [*settings, *corpus]),
        )  # fmt: skip
        self.wait_for(process, "start", 0, steps)
        self.stop(process)
        process = self.traced("resume", "resume", "traced")
        last = max(self.rows(0))
        self.wait_for(process, "resume", 1, last + 2)
        self.stop(process)
        first, second = (
            read_traces(self.folder / name, self.areas) for name in ("start", "resume")
        )
        return [
            *self._start("start", first, 0),
            *self._training(first),
            *self._start("resume", second, 1),
        ]

    def corpus(self) -> list[str]:
        code = (
            "import sys; from pathlib import Path; from slurmllm.corpus.builtin import "
            "ensure_stdlib; print(*ensure_stdlib(Path(sys.argv[1])))"
        )
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, str(self.folder / "data")],
            env=self.environment, check=True, capture_output=True, text=True,
        )  # fmt: skip
        corpus, tokenizer = done.stdout.split()[-2:]
        return [f"data.corpus={corpus}", f"data.tokenizer={tokenizer}"]

    def _start(
        self, phase: str, processes: Mapping[int, Process], attempt: int
    ) -> Iterator[dict[str, Any]]:
        until = min(row["time"] for row in self.rows(attempt).values())
        yield self._row(phase, processes, [(0.0, until)], ROLES)

    def _training(self, processes: Mapping[int, Process]) -> Iterator[dict[str, Any]]:
        # A row is written after its step, and a save comes after the row.
        times = {step: row["time"] for step, row in self.rows(0).items()}
        last = max(times)
        steps: list[tuple[float, float]] = []
        saves: list[tuple[float, float]] = []
        for step in range(2, last - 1):
            window = (times[step], times[step + 1])
            (saves if step % SAVE_EVERY == 0 else steps).append(window)
        one = self._row("step", processes, steps, ROLES[2:], 1 / len(steps))
        yield one
        save = self._row("save", processes, saves, ROLES[2:], 1 / len(saves))
        for name, areas in save["calls"].items():
            for area in areas:
                areas[area] = max(round(areas[area] - one["calls"][name][area], 2), 0.0)
        save["calls_by_name"] = {
            name: round(count - one["calls_by_name"].get(name, 0.0), 2)
            for name, count in save["calls_by_name"].items()
        }
        yield save
        window = (times[2], times[last - 1])
        yield self._row("hour", processes, [window], ROLES[:2], 3600 / (window[1] - window[0]))

    def _row(
        self, phase: str, processes: Mapping[int, Process], windows: Sequence[tuple[float, float]],
        roles: Sequence[str], scale: float = 1.0,
    ) -> dict[str, Any]:  # fmt: skip
        """Calls by role and area within time windows; of launchers and workers the mean of one."""
        workers = sorted(
            (process.began, pid) for pid, process in processes.items() if process.role == "worker"
        )
        # Rank 0 is the only one that writes metrics.
        writes = {
            pid: sum(call == "write" and area == "run" for _, area, call in processes[pid].calls)
            for _, pid in workers
        }
        rank_0 = max(writes, key=lambda pid: writes[pid], default=-1)
        counts: dict[str, Counter[str]] = {name: Counter() for name in roles}
        by_call: Counter[str] = Counter()
        for pid, process in processes.items():
            name, owner = role(processes, pid)
            if name == "worker" and owner == rank_0:
                name = "rank 0"
            if name not in counts:
                continue
            for at, area, call in process.calls:
                if any(begin <= at < end for begin, end in windows):
                    counts[name][area] += 1
                    if area == "run":
                        by_call[f"{name}: {call}"] += 1
        num_workers = self.nodes * self.given.workers
        first = min(p.began for p in processes.values() if p.role == "supervisor")
        sizes = {
            "supervisor": 1,
            "launcher": self.nodes,
            "rank 0": 1,
            "worker": max(num_workers - 1, 1),
        }
        digits = 2 if phase in ("step", "save") else 1
        return {
            "nodes": self.nodes, "workers": num_workers, "phase": phase,
            "seconds": round(windows[-1][1] - max(windows[0][0], first), 1),
            "calls": {
                name: {
                    area: round(counts[name][area] * scale / sizes[name], digits) for area in AREAS
                }
                for name in roles
            },
            "total": {
                area: round(sum(found[area] for found in counts.values()) * scale, digits)
                for area in AREAS
            },
            "calls_by_name": {n: round(c * scale, digits) for n, c in by_call.most_common()},
        }  # fmt: skip


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """A table for each phase; the growth is that of the total from the row before."""
    for phase in PHASES:
        found = [row for row in rows if row["phase"] == phase]
        names = list(found[0]["calls"])
        areas = [area for area in AREAS if any(row["total"][area] for row in found)]
        print(f"\n{phase}")
        for area in areas or ["run"]:
            head = [f"{'one ' if n in ('launcher', 'worker') else ''}{n}" for n in names]
            print(f"  {area:<7} nodes  workers" + "".join(f"{name:>14}" for name in head), end="")
            print(f"{'all':>10}{'a node':>10}{'a worker':>10}{'growth':>8}{'seconds':>9}")
            before: Mapping[str, Any] | None = None
            for row in found:
                total = row["total"][area]
                print(f"  {'':<7} {row['nodes']:>5}{row['workers']:>9}", end="")
                print("".join(f"{row['calls'][name][area]:14,.1f}" for name in names), end="")
                print(
                    f"{total:10,.0f}{total / row['nodes']:10,.1f}{total / row['workers']:10,.1f}",
                    end="",
                )
                old = before["total"][area] if before is not None else 0
                print(f"{total / old:7.2f}×" if old else f"{'':>8}", end="")
                print(f"{row['seconds']:9.1f}")
                before = row


def main() -> None:
    """Measure all sizes and print them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", default="2,4,8,16", help="numbers of nodes (%(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="workers of a node (%(default)s)")
    parser.add_argument("--backend", default="rehearsal", choices=("rehearsal", "native"))
    parser.add_argument("--seconds", type=float, default=60.0, help="of training (%(default)s)")
    parser.add_argument("--source", default=str(ROOT), help="folder that has the slurmllm to run")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE")
    parser.add_argument("--keep", metavar="FOLDER", help="keep traces and runs in a new folder")
    parser.add_argument("--json", action="store_true", help="print a list of rows instead")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="file-system-") as temporary:
        for nodes in map(int, given.nodes.split(",")):
            folder = Path(given.keep or temporary).resolve() / f"nodes_{nodes}"
            folder.mkdir(parents=True)
            rows += Run(given, folder, nodes).measure()
            print(f"{nodes} nodes measured", file=sys.stderr, flush=True)
    if given.json:
        print(json.dumps(rows, indent=2))
    else:
        print_table(rows)


if __name__ == "__main__":
    main()
