"""One object that names every file of a run, and the atomic writers of files.

Layout (`runs/<name>/`, on the shared file system):

    config.yaml                       the resolved recipe and cluster, each value with its origin
    secrets.json                      its secret variables; only the user can read it
    plan.json                         mesh degrees and batch arithmetic
    jobs.json                         what was submitted, and when
    lock.json                         the command that changes the run now
    excluded.json                     excluded nodes, why and until when
    skips.json                        batches that it skips after a divergence
    drill.json                        what `slurmllm drill` did to a run that it made
    scripts/<stage>.sbatch            the scripts as submitted
    logs/<stage>.log                  what the batch script and rank 0 print
    logs/<stage>_NNN/rank_RRRRR.log   what the other workers of an attempt print, once collected
    attempts/NNN/                     one attempt of the train stage (see AttemptDir)
    graphs/                           manifest and archive of the compiled graphs, micro batch
    graphs/failed/<graph>.log         the compiler's log of a graph that failed
    graphs/new/                       graphs compiled in training, until they are merged
    graphs/attempts/NNN/              one attempt of the precompile stage
    checkpoints/step_XXXXXXXX/        one checkpoint, whole once manifest.json is there
    metrics/attempt_NNN.jsonl         one line per step; one writer per file: an attempt's rank 0
    profiles/attempt_NNN/             traces of `profile.steps`, of each rank (see ProfileFiles)
    events/attempt_NNN.jsonl          saves, spikes and the like; a file per attempt
    evaluations/<checkpoint>/         scores of a checkpoint, a file per task
    evaluations/suites/<name>.yaml    the user's own suites
    trackers/<tracker>.json           the run's run in W&B or MLflow, and what was sent to it
    tensorboard/  reports/

A sweep (`runs/<sweep>/`, see SweepDir) holds its runs and `sweep.json`.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar, get_args

from slurmllm.errors import RunError, StorageError
from slurmllm.run.safe_files import reason, write_whole

K = TypeVar("K")
V = TypeVar("V")
Stage = Literal["precompile", "train"]
STAGES: tuple[Stage, ...] = get_args(Stage)

_STEP = re.compile(r"^step_([0-9]{8,18})$")  # as many digits as 64 bits hold
_NUMBER = re.compile(r"^(\d{3,})$")
_METRICS = re.compile(r"^attempt_(\d{3,})\.jsonl$")
_PROFILE = re.compile(r"attempt_(\d{3,18})/rank_(\d{5,18})\.trace\.json\.gz")
_READERS = 16  # threads that wait for files
_FEW = 8  # files that are read sooner than threads are started
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def write_atomic(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a file atomically: temporary name, fsync, rename, fsync of the folder.

    Raises:
        StorageError: the file system refused (full, read-only, quota).
    """
    fix = "free space or fix the file system and try again"
    write_bytes(path, text.encode(), f"cannot write {path}", fix, mode)


def report_path(kind: str, names: Sequence[str], run: Path | None, suffix: str = ".png") -> Path:
    """`reports/<kind>-<names><suffix>` in a run's directory, or without one in this folder."""
    name = "-".join([kind, *(re.sub(r"[^A-Za-z0-9._-]", "_", name)[:100] for name in names)])
    path = Path(f"{name[:200]}{suffix}")
    return path if run is None else run / "reports" / path


def write_bytes(path: Path, content: bytes, fault: str, fix: str, mode: int = 0o644) -> None:
    """Write a file as `write_atomic` does; the error message is made of `fault` and `fix`.

    Raises:
        StorageError: the file system refused.
    """
    try:
        write_whole(path, content, mode)
    except OSError as error:
        raise StorageError(f"{fault}: {error.strerror or error}; {fix}") from error


def read_all(read: Callable[[K], V], items: Iterable[K]) -> list[V]:
    """Read many small files, several at a time, and return what was read in the given order.

    On a shared file system each of them waits for its server: a thousand, one after the other, take
    seconds. The first error in that order is raised.
    """
    wanted = list(items)
    if len(wanted) < _FEW:
        return [read(item) for item in wanted]
    from concurrent.futures import ThreadPoolExecutor

    # A task of several files: handing one to a thread takes as long as reading it from a cache.
    parts = [wanted[begin : begin + _FEW] for begin in range(0, len(wanted), _FEW)]
    with ThreadPoolExecutor(_READERS) as pool:
        found = pool.map(lambda part: [read(item) for item in part], parts)
        return [one for part in found for one in part]


def fsync_dir(path: Path) -> None:
    """Make renames inside a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Inside:
    """A file or folder of fixed name in the directory of a run, an attempt or a sweep."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, owner: AttemptDir | RunDir | SweepDir, kind: type) -> Path:
        return owner.path / self._name


@dataclass(frozen=True)
class AttemptDir:
    """The files of one attempt of one stage."""

    path: Path

    record = _Inside("attempt.json")  # nodes, ending and reasons (`AttemptRecord`)
    hang = _Inside("hang.json")  # launchers then dump stacks (`HangRecord`)
    log_requests = _Inside("log_requests")  # which workers' logs `slurmllm logs` waits for

    @property
    def number(self) -> int:
        """The attempt's number, from 0."""
        return int(self.path.name)

    def node(self, name: str) -> Path:
        """A node's launcher and its workers (`NodeRecord`)."""
        return self.path / "nodes" / f"{name}.json"

    def health(self, name: str) -> Path:
        """The preflight checks of a node (`NodeHealth`)."""
        return self.path / "health" / f"{name}.json"

    def failure(self, rank: int) -> Path:
        """Why a worker failed (`FailureRecord`)."""
        return self.path / "failures" / f"rank_{rank:05d}.json"

    def heartbeat(self, name: str) -> Path:
        """The phases of a node's workers (`Heartbeat`)."""
        return self.path / "heartbeats" / f"{name}.json"

    def log_request(self, rank: int | None) -> Path:
        """A request for the log of a worker, or with None for the logs of all."""
        return self.log_requests / ("all" if rank is None else f"rank_{rank:05d}")

    def stacks(self, rank: int) -> Path:
        """The Python stacks of a worker of an attempt that hung."""
        return self.path / "stacks" / f"rank_{rank:05d}.txt"

    def worker(self, rank: int) -> Path:
        """Start-up and graph cache of a node's first worker (`WorkerRecord`)."""
        return self.path / "workers" / f"rank_{rank:05d}.json"


@dataclass(frozen=True)
class ProfileFiles:
    """The files of one worker's profile in one attempt."""

    folder: Path
    rank: int

    @property
    def trace(self) -> Path:
        """The profiler's trace, in Chrome's format."""
        return self.folder / f"rank_{self.rank:05d}.trace.json.gz"

    @property
    def summary(self) -> Path:
        """Time by part and longest operations (`profile.trace.RankProfile`)."""
        return self.folder / f"rank_{self.rank:05d}.json"

    @property
    def snapshot(self) -> Path:
        """CUDA's memory snapshot."""
        return self.folder / f"rank_{self.rank:05d}.memory.pickle"


@dataclass(frozen=True)
class RunDir:
    """The directory of one run."""

    path: Path

    config = _Inside("config.yaml")  # the resolved configuration
    secrets = _Inside("secrets.json")  # dotted path → value of the secret variables
    plan = _Inside("plan.json")  # mesh degrees and batch arithmetic
    data = _Inside("data.json")  # the corpora and their order (`DataRecord`)
    jobs = _Inside("jobs.json")  # the submissions (`JobsRecord`)
    lock = _Inside("lock.json")  # of the commands that change the run (`LockRecord`)
    excluded = _Inside("excluded.json")  # the excluded nodes (`ExcludedNodes`)
    skips = _Inside("skips.json")  # the batches that the run skips (`SkipsRecord`)
    drill = _Inside("drill.json")  # what a drill did to it (`drill.injector.Injection`)
    logs = _Inside("logs")  # the folder of all logs
    graphs = _Inside("graphs")  # the folder of the compiled graphs
    graphs_manifest = _Inside("graphs/manifest.json")  # of the archive (`GraphManifest`)
    new_graphs = _Inside("graphs/new")  # compiled in training, until they are merged
    micro_batch = _Inside("graphs/micro_batch.json")  # as measured (`MicroBatchRecord`)
    checkpoints = _Inside("checkpoints")  # the folder of the checkpoints
    tensorboard = _Inside("tensorboard")  # TensorBoard event files
    profiles = _Inside("profiles")  # the folder of all profiles
    neuron_profiles = _Inside("profiles/neuron")  # of the Neuron runtime
    evaluations = _Inside("evaluations")  # the folder of all scores
    reports = _Inside("reports")  # pictures and reports made after the run

    report = _Inside("reports/report.html")  # as `slurmllm report` names it
    trackers = _Inside("trackers")  # the records of trackers, W&B's own files
    track_log = _Inside("logs/track.log")  # of the process that sends to trackers

    @property
    def name(self) -> str:
        """The run's name, which is the directory's."""
        return self.path.name

    def events(self, attempt: int) -> Path:
        """Events of an attempt besides its steps, a JSON line each (`Event`)."""
        return self.path / "events" / f"attempt_{attempt:03d}.jsonl"

    def script(self, stage: Stage) -> Path:
        """A stage's batch script as submitted."""
        return self.path / "scripts" / f"{stage}.sbatch"

    def stage_log(self, stage: Stage) -> Path:
        """Output of the batch script and of rank 0; every attempt appends to it."""
        return self.logs / f"{stage}.log"

    def worker_log(self, stage: Stage, attempt: int, rank: int) -> Path:
        """Output of a worker other than rank 0, as far as its launcher has collected it."""
        return self.logs / f"{stage}_{attempt:03d}" / f"rank_{rank:05d}.log"

    def attempts(self, stage: Stage) -> list[AttemptDir]:
        """The attempts of a stage so far, oldest first."""
        folder = self._attempts_dir(stage)
        if not folder.is_dir():
            return []
        found = [AttemptDir(entry) for entry in folder.iterdir() if _NUMBER.match(entry.name)]
        return sorted(found, key=lambda attempt: attempt.number)

    def attempt(self, stage: Stage, number: int) -> AttemptDir:
        """One attempt's files."""
        return AttemptDir(self._attempts_dir(stage) / f"{number:03d}")

    def _attempts_dir(self, stage: Stage) -> Path:
        return self.path / "attempts" if stage == "train" else self.graphs / "attempts"

    def graphs_archive(self, name: str = "graphs.tar") -> Path:
        """The archive of compiled graphs; the manifest names the current one."""
        return self.graphs / name

    def graph_log(self, graph: str) -> Path:
        """The compiler's log of a graph that failed."""
        return self.graphs / "failed" / f"{graph}.log"

    def graphs_of_node(self, name: str) -> Path:
        """Compiled graphs of one of several precompile nodes, until they are archived."""
        return self.graphs / f"from_{name}.tar"

    def checkpoint(self, step: int) -> Path:
        """The checkpoint after `step` optimizer steps."""
        return self.checkpoints / f"step_{step:08d}"

    def checkpoint_steps(self) -> list[int]:
        """The steps of all checkpoint folders, oldest first, verified or not."""
        if not self.checkpoints.is_dir():
            return []
        matches = (_STEP.match(entry.name) for entry in self.checkpoints.iterdir())
        return sorted(int(match.group(1)) for match in matches if match)

    def metrics(self, attempt: int) -> Path:
        """The metrics of one attempt, a JSON line per step (`MetricsRow`)."""
        return self.path / "metrics" / f"attempt_{attempt:03d}.jsonl"

    def profile(self, attempt: int, rank: int) -> ProfileFiles:
        """The profile of a worker in an attempt."""
        return ProfileFiles(self.profiles / f"attempt_{attempt:03d}", rank)

    def profiled(self) -> dict[int, list[ProfileFiles]]:
        """The profiles of each attempt that has any, by rank, oldest attempt first."""
        found: dict[int, list[ProfileFiles]] = {}
        for trace in sorted(self.profiles.glob("attempt_*/rank_*.trace.json.gz")):
            if match := _PROFILE.fullmatch(f"{trace.parent.name}/{trace.name}"):
                attempt, rank = (int(number) for number in match.groups())
                found.setdefault(attempt, []).append(ProfileFiles(trace.parent, rank))
        return found

    def hook_rows(self, hook: str, attempt: int) -> Path:
        """What a hook of one's own writes in an attempt, JSON lines (`HookContext.write`)."""
        return self.path / "hooks" / hook / f"attempt_{attempt:03d}.jsonl"

    def metrics_files(self) -> list[Path]:
        """The metrics of all attempts, oldest attempt first."""
        folder = self.path / "metrics"
        if not folder.is_dir():
            return []
        found = [(int(m.group(1)), e) for e in folder.iterdir() if (m := _METRICS.match(e.name))]
        return [entry for _, entry in sorted(found)]

    def tracker(self, name: str) -> Path:
        """The run's run in a tracker (`track.sync.TrackerRecord`)."""
        return self.trackers / f"{name}.json"

    def evaluation(self, checksum: str, key: str) -> Path:
        """The scores of a checkpoint in a task (`EvaluationRecord`).

        Args:
            checksum: Of the checkpoint.
            key: Of the task as it was set up.
        """
        return self.evaluations / checksum[:16] / f"{key}.json"

    def evaluation_files(self) -> list[Path]:
        """All of these, sorted by name."""
        return sorted(self.evaluations.glob("*/*.json"))

    def evaluation_suite(self, name: str) -> Path:
        """A suite of the user's (`evaluate.suites.Suite`)."""
        return self.evaluations / "suites" / f"{name}.yaml"

    def evaluation_suites(self) -> list[Path]:
        """All of these, sorted by name."""
        return sorted((self.evaluations / "suites").glob("*.yaml"))


@dataclass(frozen=True)
class SweepDir:
    """The directory of a sweep: one run for each case, and the runs that compile their graphs."""

    path: Path

    record = _Inside("sweep.json")  # the cases (`SweepRecord`)
    reports = _Inside("reports")  # reports of all runs

    @property
    def name(self) -> str:
        """The sweep's name, which is the directory's."""
        return self.path.name

    def run(self, name: str) -> RunDir:
        return RunDir(self.path / name)

    @property
    def graphs(self) -> Path:
        """The folder of the runs that only compile graphs, each for some of the sweep's runs."""
        return self.path / "graphs"

    def graph_run(self, name: str) -> RunDir:
        return RunDir(self.graphs / name)

    def graph_runs(self) -> list[RunDir]:
        """The runs that only compile graphs, sorted by name."""
        found = [RunDir(entry) for entry in _entries(self.graphs) if is_run(entry)]
        return sorted(found, key=lambda run: run.name)


def find_sweep(name: str, root: Path) -> SweepDir | None:
    """A sweep by its name under `root` or by its directory; None if there is none."""
    for path in (root / name, Path(name).absolute()):
        if name and is_sweep(path):
            return SweepDir(path)
    return None


def is_sweep(path: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return (path / "sweep.json").is_file()
    return False


def run_folders(root: Path) -> Iterator[Path]:
    """What may be a run in a folder of runs: its entries, and those of the sweeps in it.

    Raises:
        OSError: the folder cannot be read.
    """
    for entry in root.iterdir():
        yield entry
        if is_sweep(entry):
            yield from _entries(entry)


def root_of(run: RunDir) -> Path:
    """The folder of all runs that a run is in, by itself or as one of a sweep."""
    folders = run.path.parents[:2]
    return next((folder.parent for folder in folders if is_sweep(folder)), folders[0])


def _entries(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return list(folder.iterdir())
    return []


def runs_root(option: str | None = None) -> Path:
    """The folder of all runs: the option, else $SLURMLLM_RUNS, else `runs` here."""
    return Path(option or os.environ.get("SLURMLLM_RUNS") or "runs").absolute()


def is_run(path: Path) -> bool:
    """Whether a folder is a run's, whose files this user may read."""
    with contextlib.suppress(PermissionError):
        return (path / "config.yaml").is_file()
    return False


def find_run(run: str, root: Path) -> RunDir:
    """Find a run by its name under `root` or in a sweep there, or by its directory.

    Raises:
        RunError: No such run; the message lists those that exist.
    """
    if find_sweep(run, root) is not None:
        raise RunError(
            f"{run} is a sweep of several runs; name one of them (`slurmllm status {run}` lists "
            "them); status, cancel, compare and report also take a sweep"
        )
    for candidate in (root / run, Path(run).absolute()):
        if is_run(candidate):
            return RunDir(candidate)
        try:
            (candidate / "config.yaml").lstat()
        except PermissionError as error:
            raise RunError(f"cannot read the run {candidate}: {reason(error)}") from error
        except (OSError, ValueError):  # there is none
            continue
        raise RunError(f"{candidate / 'config.yaml'} is not a regular file; restore or remove it")
    known: list[str] = []
    with contextlib.suppress(OSError):
        runs = [entry for entry in run_folders(root) if is_run(entry)]
        if found := [entry for entry in runs if entry.name == run]:
            return RunDir(found[0])
        known = sorted(entry.name for entry in runs)
    listing = f"runs there: {', '.join(known[-10:])}" if known else "there are no runs yet"
    raise RunError(
        f"no run {run!r}: neither {root / run} nor {Path(run).absolute()} holds a config.yaml; "
        f"{listing} (--runs-dir or $SLURMLLM_RUNS names another folder)"
    )
