"""One object that names every file of a run, and the atomic writers of files.

docs/developing/architecture.md has the layout of a run directory: each file and who writes it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, TypeVar, TypeVarTuple, get_args

from slurmllm.core.errors import RunError, SlurmllmError, StorageError
from slurmllm.core.run.safe_files import os_error_text, write_whole

K = TypeVar("K")
V = TypeVar("V")
Keys = TypeVarTuple("Keys")
Stage = Literal["precompile", "train"]
STAGES: tuple[Stage, ...] = get_args(Stage)

_STEP = re.compile(r"^step_([0-9]{8,18})$")  # as many digits as 64 bits hold
_NUMBER = re.compile(r"^(\d{3,})$")
_METRICS = re.compile(r"^attempt_(\d{3,})\.jsonl$")
_READERS = 16  # threads that wait for files
_FEW = 8  # files that are read sooner than threads are started
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def write_atomic(path: Path, content: str, mode: int = 0o644) -> None:
    """Write a file atomically: temporary name, fsync, rename, fsync of the folder."""
    write_bytes(
        path,
        content.encode(),
        f"cannot write {path}",
        "free space or fix the file system and try again",
        mode,
    )


def report_path(kind: str, names: Sequence[str], run: Path | None, suffix: str = ".png") -> Path:
    """Return `reports/<kind>-<names><suffix>` of a run, without one in this folder."""
    name = "-".join([kind, *(re.sub(r"[^A-Za-z0-9._-]", "_", name)[:100] for name in names)])
    path = Path(f"{name[:200]}{suffix}")
    return path if run is None else run / "reports" / path


def write_bytes(path: Path, content: bytes, fault: str, fix: str, mode: int = 0o644) -> None:
    """Write a file as `write_atomic` does; `fault` and `fix` make the error message."""
    with storage_errors(fault, fix):
        write_whole(path, content, mode)


@contextmanager
def storage_errors(
    fault: str, fix: str = "", kind: type[SlurmllmError] = StorageError
) -> Iterator[None]:
    """Raise OSErrors of a block as a `kind`: the fault, its reason, what the user can do."""
    try:
        yield
    except OSError as error:
        message = f"{fault}: {os_error_text(error)}"
        raise kind(f"{message}; {fix}" if fix else message) from error


def read_all(read: Callable[[K], V], items: Iterable[K]) -> list[V]:
    """Read many small files at a time: on a shared file system each waits for its server.

    The first error, in the order of the items, is raised.
    """
    paths = list(items)
    if len(paths) < _FEW:
        return [read(path) for path in paths]
    from concurrent.futures import ThreadPoolExecutor

    # A task of several files: handing one to a thread takes as long as reading it from a cache.
    parts = [paths[begin : begin + _FEW] for begin in range(0, len(paths), _FEW)]
    with ThreadPoolExecutor(_READERS) as pool:
        contents = pool.map(lambda item: [read(path) for path in item], parts)
        return [content for item in contents for content in item]


def files_by_rank(prefix: str, ending: str = "") -> dict[int, Path]:
    """Return rank → file named `<prefix><rank><ending>`; empty if the prefix is."""
    name = re.compile(rf"{re.escape(Path(prefix).name)}([0-9]+){re.escape(ending)}")
    paths = sorted(Path(prefix).parent.glob(f"*{ending}")) if prefix else ()
    return {int(match[1]): path for path in paths if (match := name.fullmatch(path.name))}


def read_by_rank(path_of: Callable[[int], Path], read: Callable[[Path], V]) -> dict[int, V]:
    """Return rank → content of the ranks' files in an attempt's directory, if it can be read."""
    folder = path_of(0).parent
    ending = path_of(0).suffix
    paths = files_by_rank(str(folder / "rank_"), ending)

    def read_or_none(path: Path) -> V | None:
        with suppress(OSError, ValueError, StorageError):
            return read(path)
        return None

    contents = zip(paths, read_all(read_or_none, paths.values()), strict=True)
    return {rank: content for rank, content in contents if content is not None}


def fsync_dir(path: Path) -> None:
    """Make renames inside a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class FixedPath:
    """A file or folder of fixed name in the directory of a run, an attempt or a sweep."""

    form: str

    def __get__(self, owner: AttemptDir | RunDir | SweepDir, kind: type) -> Path:
        return owner.path / self.form


@dataclass(frozen=True)
class PathOf(Generic[*Keys]):
    """A function that returns the file of a node, a rank, a step or the like in a directory."""

    form: str

    def __get__(self, owner: AttemptDir | RunDir, kind: type) -> Callable[[*Keys], Path]:
        return lambda *keys: owner.path / self.form.format(*keys)


@dataclass(frozen=True)
class AttemptDir:
    """The files of one attempt of one stage."""

    path: Path

    record = FixedPath("attempt.json")  # nodes, ending and reasons (`AttemptRecord`)
    hang = FixedPath("hang.json")  # launchers then dump stacks (`HangRecord`)
    slow_ranks = FixedPath("slow_ranks.json")  # slower than others (`SlowRanksRecord`)
    ras = FixedPath("collectives/ras.txt")  # NCCL's report on an attempt that hung
    # By the name of a node:
    node = PathOf[str]("nodes/{}.json")  # its launcher and its workers (`NodeRecord`)
    health = PathOf[str]("health/{}.json")  # its preflight checks (`NodeHealth`)
    heartbeat = PathOf[str]("heartbeats/{}.json")  # phases of its workers (`Heartbeat`)
    # By rank:
    failure = PathOf[int]("failures/rank_{:05d}.json")  # why a worker failed (`FailureRecord`)
    stacks = PathOf[int]("stacks/rank_{:05d}.txt")  # Python stacks of an attempt that hung
    collectives = PathOf[int]("collectives/rank_{:05d}.json")  # operations (`Recording`)
    worker = PathOf[int]("workers/rank_{:05d}.json")  # of a node's first one (`WorkerRecord`)

    @property
    def number(self) -> int:
        return int(self.path.name)


@dataclass(frozen=True)
class RunDir:
    """The directory of one run."""

    path: Path

    config = FixedPath("config.yaml")  # the resolved configuration
    secrets = FixedPath("secrets.json")  # dotted path → value of the secret variables
    plan = FixedPath("plan.json")  # mesh degrees and batch arithmetic
    data = FixedPath("data.json")  # the corpora and their order (`DataRecord`)
    jobs = FixedPath("jobs.json")  # the submissions (`JobsRecord`)
    lock = FixedPath("lock.json")  # of the commands that change the run (`LockRecord`)
    excluded = FixedPath("excluded.json")  # the excluded nodes (`ExcludedNodes`)
    set_aside = FixedPath("set_aside")  # broken checkpoints of another project's trainer
    skips = FixedPath("skips.json")  # the batches that the run skips (`SkipsRecord`)
    drill = FixedPath("drill.json")  # what a drill did to it (`drill.injector.Injection`)
    logs = FixedPath("logs")  # the folder of all logs
    graphs = FixedPath("graphs")  # the folder of the compiled graphs
    graphs_manifest = FixedPath("graphs/manifest.json")  # of the archive (`GraphManifest`)
    new_graphs = FixedPath("graphs/new")  # compiled in training, until they are merged
    micro_batch = FixedPath("graphs/micro_batch.json")  # as measured (`MicroBatchRecord`)
    checkpoints = FixedPath("checkpoints")  # the folder of the checkpoints
    tensorboard = FixedPath("tensorboard")  # TensorBoard event files
    profiles = FixedPath("profiles")  # the folder of all profiles
    neuron_profiles = FixedPath("profiles/neuron")  # of the Neuron runtime
    evaluations = FixedPath("evaluations")  # the folder of all scores
    reports = FixedPath("reports")  # pictures and reports made after the run

    report = FixedPath("reports/report.html")  # as `slurmllm report` names it
    trackers = FixedPath("trackers")  # the records of trackers, W&B's own files
    track_log = FixedPath("logs/track.log")  # of the process that sends to trackers
    evaluator_log = FixedPath("logs/evaluator.log")  # of the process that submits evaluations
    exporter_log = FixedPath("logs/prometheus.log")  # of the process that exports metrics
    script = PathOf[Stage]("scripts/{}.sbatch")  # of a stage, as submitted
    stage_log = PathOf[Stage]("logs/{}.log")  # batch script and rank 0, of all attempts
    graph_log = PathOf[str]("graphs/failed/{}.log")  # the compiler's, of a graph that failed
    graphs_of_node = PathOf[str]("graphs/from_{}.tar")  # of precompile, until they are archived
    checkpoint = PathOf[int]("checkpoints/step_{:08d}")  # after so many optimizer steps
    metrics = PathOf[int]("metrics/attempt_{:03d}.jsonl")  # a line per step (`MetricsRow`)
    events = PathOf[int]("events/attempt_{:03d}.jsonl")  # of an attempt (`Event`)
    tracker = PathOf[str]("trackers/{}.json")  # the run's run there (`track.sync.TrackerRecord`)
    evaluation_suite = PathOf[str]("evaluations/suites/{}.yaml")  # the user's (`Suite`)
    # Scores of a checkpoint, by its checksum, in a task (`EvaluationRecord`)
    evaluation = PathOf[str, str]("evaluations/{:.16}/{}.json")
    # By step: evaluations during training (`CheckpointEvaluation`)
    evaluating = PathOf[int]("evaluating/step_{:08d}.json")
    # By name and attempt: a plugin's output, JSON lines (`HookContext.write`)
    hook_rows = PathOf[str, int]("hooks/{}/attempt_{:03d}.jsonl")
    # By attempt and rank: the profiler's trace, in Chrome's format; CUDA's memory snapshot
    trace = PathOf[int, int]("profiles/attempt_{:03d}/rank_{:05d}.trace.json.gz")
    memory_snapshot = PathOf[int, int]("profiles/attempt_{:03d}/rank_{:05d}.memory.pickle")

    @property
    def name(self) -> str:
        return self.path.name

    def outputs(self) -> list[Path]:
        """Return what another project's trainer has written into the directory."""
        parts = (item for item in vars(RunDir).values() if isinstance(item, FixedPath | PathOf))
        ours = {"attempts", "core", *(item.form.partition("/")[0] for item in parts)}
        ours -= {self.checkpoints.name}
        entries = (entry for entry in _entries(self.path) if entry.name not in ours)
        # Temporary files and core files are none.
        return [e for e in entries if e.is_dir() or not e.name.startswith((".", "core."))]

    def worker_log(self, stage: Stage, attempt: int, rank: int) -> Path:
        """Return the output of a worker, as far as it has been collected; rank 0's: the stage's."""
        if rank == 0:
            return self.stage_log(stage)
        return self.logs / f"{stage}_{attempt:03d}" / f"rank_{rank:05d}.log"

    def attempts(self, stage: Stage) -> list[AttemptDir]:
        return [AttemptDir(path) for _, path in _numbered(self._attempts_dir(stage), _NUMBER)]

    def next_attempt_number(self, stage: Stage) -> int:
        """Return the number of the next attempt of a stage."""
        return max((attempt.number for attempt in self.attempts(stage)), default=-1) + 1

    def attempt(self, stage: Stage, number: int) -> AttemptDir:
        return AttemptDir(self._attempts_dir(stage) / f"{number:03d}")

    def _attempts_dir(self, stage: Stage) -> Path:
        return self.path / "attempts" if stage == "train" else self.graphs / "attempts"

    def graphs_archive(self, name: str = "graphs.tar") -> Path:
        """Return an archive of compiled graphs; the manifest names the current one."""
        return self.graphs / name

    def checkpoint_steps(self) -> list[int]:
        """Return the steps of all checkpoint folders, oldest first, verified or not."""
        return [step for step, _ in _numbered(self.checkpoints, _STEP)]

    def only_checkpoints(self) -> bool:
        """Return whether all but the checkpoints has been deleted."""
        with suppress(OSError, ValueError):
            steps = {self.checkpoint(step) for step in self.checkpoint_steps()}
            entries = [*self.path.iterdir()]
            return entries == [self.checkpoints] and steps == {*self.checkpoints.iterdir()}
        return False

    def metrics_files(self) -> list[Path]:
        return [path for _, path in _numbered(self.path / "metrics", _METRICS)]

    def evaluation_files(self) -> list[Path]:
        return sorted(self.evaluations.glob("*/*.json"))

    def evaluation_suites(self) -> list[Path]:
        return sorted((self.evaluations / "suites").glob("*.yaml"))


def _numbered(folder: Path, pattern: re.Pattern[str]) -> list[tuple[int, Path]]:
    """Return the entries of a folder that have a number in their name, sorted by it."""
    entries = folder.iterdir() if folder.is_dir() else ()
    return sorted((int(m.group(1)), entry) for entry in entries if (m := pattern.match(entry.name)))


@dataclass(frozen=True)
class SweepDir:
    """The directory of a sweep: one run for each case, and the runs that compile their graphs."""

    path: Path

    record = FixedPath("sweep.json")  # the cases (`SweepRecord`)
    reports = FixedPath("reports")  # reports of all runs
    graphs = FixedPath("graphs")  # the folder of the runs that only compile graphs

    @property
    def name(self) -> str:
        return self.path.name

    def run(self, name: str) -> RunDir:
        return RunDir(self.path / name)

    def graph_run(self, name: str) -> RunDir:
        return RunDir(self.graphs / name)

    def graph_runs(self) -> list[RunDir]:
        """Return the runs that only compile graphs, sorted by name."""
        return [RunDir(entry) for entry in sorted(_entries(self.graphs)) if is_run(entry)]


def find_sweep(name: str, root: Path) -> SweepDir | None:
    """Find a sweep by its name under `root` or by its directory."""
    for path in (root / name, Path(name).absolute()):
        if name and is_sweep(path):
            return SweepDir(path)
    return None


def find_run_or_sweep(name: str, root: Path) -> RunDir | SweepDir:
    return find_sweep(name, root) or find_run(name, root)


def is_sweep(path: Path) -> bool:
    with suppress(OSError, ValueError):
        return (path / "sweep.json").is_file()
    return False


def run_folders(root: Path) -> Iterator[Path]:
    """Yield possible run directories, including those inside sweeps."""
    for entry in root.iterdir():
        yield entry
        if is_sweep(entry):
            yield from _entries(entry)


def root_of(run: RunDir) -> Path:
    """Return the folder of all runs that a run is in, by itself or as one of a sweep."""
    folders = run.path.parents[:2]
    return next((folder.parent for folder in folders if is_sweep(folder)), folders[0])


def _entries(folder: Path) -> list[Path]:
    with suppress(OSError):
        return list(folder.iterdir())
    return []


def runs_root(option: str | Path | None = None) -> Path:
    """Return the folder of all runs: the option, else $SLURMLLM_RUNS, else `runs` here."""
    return Path(option or os.environ.get("SLURMLLM_RUNS") or "runs").absolute()


def node_records(root: Path) -> Path:
    """Return the folder in a runs folder that has the records of nodes (`SiteNodeRecord`)."""
    return root / ".nodes"


def is_run(path: Path) -> bool:
    """Return whether a folder is a run's, whose files this user may read."""
    with suppress(PermissionError):
        return (path / "config.yaml").is_file()
    return False


def find_run(run: str, root: Path) -> RunDir:
    """Find a run by its name under `root` or in a sweep there, or by its directory."""
    if find_sweep(run, root) is not None:
        raise RunError(
            f"{run} is a sweep of several runs; name one of them (`slurmllm status {run}` lists "
            "them); status, cancel, delete, compare and report also take a sweep"
        )
    for candidate in (root / run, Path(run).absolute()):
        if is_run(candidate):
            return RunDir(candidate)
        try:
            (candidate / "config.yaml").lstat()
        except PermissionError as error:
            raise RunError(f"cannot read the run {candidate}: {os_error_text(error)}") from error
        except (OSError, ValueError):  # there is none
            continue
        raise RunError(f"{candidate / 'config.yaml'} is not a regular file; restore or remove it")
    runs = {}
    with suppress(OSError):
        runs = {entry.name: entry for entry in run_folders(root) if is_run(entry)}
    if run in runs:
        return RunDir(runs[run])
    names = ", ".join(sorted(runs)[-10:])
    if len(runs) > 10:
        names = f"…, {names}"
    listing = f"runs there: {names}" if names else "there are no runs yet"
    raise RunError(
        f"no run {run!r}: neither {root / run} nor {Path(run).absolute()} holds a config.yaml; "
        f"{listing} (--runs-dir or $SLURMLLM_RUNS names another folder)"
    )
