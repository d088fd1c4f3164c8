"""The current state of runs and sweeps, from their directories and from Slurm."""

from __future__ import annotations

import math
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic_core import to_jsonable_python

from slurmllm.analysis.status.details import Details, read_details
from slurmllm.core.config.command import CommandConfig
from slurmllm.core.config.load import load, read_summary, summarize
from slurmllm.core.display.tables import data_frame
from slurmllm.core.errors import SlurmError, SlurmllmError, StorageError
from slurmllm.core.format import Json, format_names, format_number, format_plural
from slurmllm.core.metrics.row_reader import (
    json_number,
    last_row,
    last_row_of,
    last_rows,
    reading,
)
from slurmllm.core.metrics.step_time import finite_number, read_pace
from slurmllm.core.run.artifact_records import CheckpointManifest
from slurmllm.core.run.error_patterns import matches
from slurmllm.core.run.records import (
    AttemptRecord,
    Attempts,
    SkipsRecord,
    SweepRecord,
    last_submission,
    runs_of,
)
from slurmllm.core.run.rundir import RunDir, SweepDir, run_folders, storage_errors
from slurmllm.core.run.safe_files import os_error_text, write_error
from slurmllm.core.slurm.client import PartitionNode, QueuedJob, SlurmClient
from slurmllm.core.slurm.site import explain_drain
from slurmllm.launch.supervise.run_state import (
    Jobs,
    JobState,
    RunRecords,
    derive_state,
    job_ids,
    query_queue,
    read_job_states,
    read_records,
)
from slurmllm.launch.supervise.watchdog import read_heartbeats
from slurmllm.train.checkpoint.catalogue import invalidation_reason
from slurmllm.train.checkpoint.foreign import list_trainer_checkpoints, newest_complete

if TYPE_CHECKING:
    import pandas

_SHOWN = 3  # texts about nodes
# ParallelCluster's codes of EC2's errors, such as InsufficientInstanceCapacity.
_NO_CAPACITY = re.compile(r"\(Code:\w*(Capacity|Exceeded|InsufficientFreeAddresses|Spot)\w*\)")
# Columns of a data frame of runs
_TABLE = ["name", "recipe", "state", "reason", "nodes", "step", "steps", "loss", "tokens"]
_TABLE += ["seq_per_s", "eta_s", "restarts", "node_hours", "usd", "run_dir"]
_LAST_PART = 0.1  # of the steps of a sweep's run, whose mean loss ranks it
_MOST_ROWS = 1000
ACTIVE = ("queued", "waiting", "precompiling", "training", "requeued")
STATES = (*ACTIVE, "done", "stopped", "cancelled", "interrupted", "unknown", "damaged")


@dataclass(frozen=True)
class SavedCheckpoint:
    """A complete checkpoint."""

    step: int
    saved_at: float  # Unix time, s
    age_s: float


@dataclass(frozen=True)
class RunState:
    """The current state of a run."""

    name: str
    run_dir: str
    recipe: str = ""
    # queued, waiting (local sweep), precompiling, training, requeued, done, stopped, cancelled,
    # interrupted, unknown (slurmctld is unreachable) or damaged (a record cannot be read)
    state: str = "damaged"
    reason: str = ""  # one line that explains the state; empty if nothing needs to be explained
    nodes: int = 0
    step: int = 0  # last trained step, of `steps`
    steps: int | None = 0  # None: a command's, which does not say
    # of a command that ended with 0 before its last step: last step by its log, and `steps`
    done_early: tuple[int, int] | None = None
    metrics: Json = field(default_factory=dict)  # the last row of metrics, as stored
    loss: float | None = None  # the loss of that row; None if it is not finite
    tokens: int | None = None  # tokens trained so far
    seq_per_s: float | None = None  # median of the recent steps
    step_s: float | None = None  # median of the recent steps
    tokens_per_s: float | None = None  # the same
    # seconds to the last step at the recent pace, with saves and without further restarts; None if
    # the run is not training
    eta_s: float | None = None
    finish_at: float | None = None  # Unix time of the last step, s
    # the newest complete checkpoint that no roll-back has invalidated
    last_checkpoint: SavedCheckpoint | None = None
    checkpoints: list[int] = field(default_factory=list)  # steps of all checkpoint folders
    restarts: int = 0  # attempts of the train stage after the first
    node_hours: float = 0.0  # node hours of all attempts of both stages
    usd: float | None = None  # their cost by the profile's on-demand price; None without a price
    # stage → its Slurm job; in a list of runs only jobs whose state was needed
    jobs: Jobs = field(default_factory=dict)
    attempts: list[AttemptRecord] = field(default_factory=list)  # attempts of the train stage
    details: Details | None = None  # only of a run that was read by itself

    def __repr__(self) -> str:
        speed = "" if self.seq_per_s is None else f", {format_number(self.seq_per_s)} seq/s"
        reason = f"; {self.reason}" if self.reason else ""
        return f"<RunState {self.name}: {self.state}, step {self.step_text}{speed}{reason}>"

    @property
    def step_text(self) -> str:
        """`41/120`, or `41` if the end is not known."""
        return str(self.step) if self.steps is None else f"{self.step}/{self.steps}"

    @property
    def state_text(self) -> str:
        """The state, such as `done early, 60 of 80`."""
        return self.attempts[-1].early_text if self.done_early else self.state

    @property
    def active(self) -> bool:
        """Whether the run is pending or running."""
        return self.state in ACTIVE

    @property
    def slurm_unreachable(self) -> bool:
        """Whether the state is unknown because slurmctld is unreachable."""
        return self.state == "unknown" and any(job.reason for job in self.jobs.values())

    def to_dict(self) -> Json:
        """Return it for JSON; a number that is not finite is None."""
        values = dict(vars(self))
        details = values.pop("details")
        # JSON has no NaN and no infinity, such as in a loss; `to_json` refuses names that are no
        # UTF-8.
        document: Json = to_jsonable_python(
            values if details is None else values | details.to_dict(), inf_nan_mode="null"
        )
        return document


class RunStates(tuple[RunState, ...]):
    """The states of several runs, the newest last."""

    __slots__ = ()

    def to_dict(self) -> Json:
        """Return them for JSON."""
        return {"runs": [state.to_dict() for state in self]}

    def to_pandas(self) -> pandas.DataFrame:
        """Return a row for each run, without its attempts, jobs and metrics."""
        return data_frame(self.to_dict()["runs"], _TABLE)


def list_runs(root: Path) -> list[RunDir]:
    """Return the runs in a folder and its sweeps, the newest last, unreadable ones included."""
    with storage_errors(f"cannot list the runs in {root}"):
        try:
            entries = [entry for entry in run_folders(root) if not entry.name.startswith(".")]
        except FileNotFoundError:
            return []
    runs = []
    for entry in entries:
        try:
            # Not `is_run`: a run whose configuration is no file is damaged, not absent.
            modified = (entry / "config.yaml").lstat().st_mtime
        except PermissionError:  # a folder of another user, who lets nobody in
            modified = 0.0
        except OSError:  # no run, or removed since the folder was listed
            continue
        runs.append((modified, entry.name, RunDir(entry)))
    return [run for *_, run in sorted(runs, key=itemgetter(0, 1))]


def run_state(run: RunDir, client: SlurmClient) -> RunState:
    """Return the state of a run, with its details; StorageError if a record is damaged."""
    try:
        config = load(run.config)
        records = read_records(run, summarize(config))
        queue = query_queue([records.submission], client)
        jobs = read_job_states(run, records.submission, queue, client)
        state = _build_state(_reread(records, jobs), jobs)
        if state.state in ("queued", "requeued"):
            partition = config.recipe.slurm.partition or config.cluster.partition
            waiting = queue.jobs.values()
            messages = [
                state.reason,
                *_node_texts(client, partition, state, waiting),
                *_excluding(run, waiting, config.recipe.slurm.exclude, client),
            ]
            state = replace(state, reason="; ".join(filter(None, messages)))
        return replace(state, details=read_details(run, state.attempts, state.state, config))
    except OSError as error:
        raise StorageError(_unreadable(run, error)) from error


def supervised_state(run: RunDir) -> RunState:
    """Return the state of a run for a child of its supervisor, without a query to Slurm."""
    try:
        records = read_records(run, read_summary(run.config))
        job = job_ids(records.submission).get("train")
        return _build_state(records, {} if job is None else {"train": JobState(job, "RUNNING")})
    except Exception as error:  # whatever is in its files
        return _damaged(run, error)


def state_text(run: RunDir, client: SlurmClient) -> str:
    """Return the state of a run with its reason, for messages."""
    state = run_states([run], client)[0]
    return f"{state.state}, {state.reason or 'starting'}; see `slurmllm status {run.name}`"


def run_states(runs: Sequence[RunDir], client: SlurmClient) -> list[RunState]:
    """Return the states of many runs; `damaged` if a run's records cannot be read.

    Slurm is queried once, for the jobs of all runs whose records do not show that they have ended.
    """

    def read(run: RunDir) -> RunRecords | RunState:
        try:
            return read_records(run, read_summary(run.config))
        except Exception as error:  # whatever is in its files, it must not hide the others
            return _damaged(run, error)

    def build(records: RunRecords | RunState) -> RunState:
        if isinstance(records, RunState):
            return records
        try:
            if records.ended:
                return _build_state(records, {})
            jobs = read_job_states(records.run, records.submission, queue, client, brief=True)
            return _build_state(_reread(records, jobs), jobs)
        except Exception as error:
            return _damaged(records.run, error)

    everything = [read(run) for run in runs]
    # One call of squeue for all: a call per run would load slurmctld.
    open_runs = (r for r in everything if isinstance(r, RunRecords) and not r.ended)
    queue = query_queue([records.submission for records in open_runs], client)
    return [build(records) for records in everything]


def _reread(records: RunRecords, jobs: Jobs) -> RunRecords:
    """Read records again if Slurm shows no active job: the last ones may have come meanwhile."""
    if any(job.waits or job.has_nodes for job in jobs.values()):
        return records
    return read_records(records.run, records.config)


def _excluding(
    run: RunDir, jobs: Iterable[QueuedJob], exclude: str | None, client: SlurmClient
) -> list[str]:
    """Return how to end exclusions, except the recipe's, that may leave jobs without nodes."""
    waits = ("BadConstraints", "ReqNodeNotAvail", "Resources")
    lists = {job.excluded for job in jobs if job.excluded and job.reason.startswith(waits)}
    names: set[str] = set()
    with suppress(SlurmError):
        names = {name for nodes in lists for name in client.hostnames(nodes)}
        if names and exclude:
            names -= {*client.hostnames(exclude)}
    if not names:
        return []
    options = "".join(f" --include {name}" for name in sorted(names))
    excluded = " ".join(sorted(names))
    return [f"excluded: {excluded}; `slurmllm resume {run.name}{options}` uses them"]


def _node_texts(
    client: SlurmClient, partition: str | None, state: RunState, jobs: Iterable[QueuedJob]
) -> list[str]:
    """Return what keeps nodes from a run that is pending: drained, down, or without capacity."""
    nodes: list[PartitionNode] = []
    with suppress(SlurmError):
        nodes = client.partition_nodes()
    messages = sorted({message for node in nodes if (message := explain_drain(node))})
    names = partition.split(",") if partition else None
    # By name: a node may be in two of them.
    members = {n.name: n for n in nodes if (n.partition in names if names else n.default)}
    # Slurm 24.11 lists nodes that are down, and not those that are drained.
    rows = [job for job in jobs if job.reason.startswith("ReqNodeNotAvail")]
    lists = [(job.reason.partition("UnavailableNodes:")[2], job.requested) for job in rows]
    listed = ",".join(filter(None, chain(*lists)))
    away = [node for node in members.values() if not (node.in_service or explain_drain(node))]
    if listed:
        with suppress(SlurmError):
            unavailable = client.hostnames(listed)
            away = [node for node in away if node.name in unavailable]
    elif len(members) - len(away) >= state.nodes:
        return messages[:_SHOWN]
    by_reason: dict[str, list[str]] = {}
    for node in away:
        message = node.reason or "no reason recorded"
        if _NO_CAPACITY.search(message):
            message += (
                " (the cloud has no free machines of this kind and Slurm asks again by itself; "
                f"`slurmllm cancel {state.name}` and `slurmllm resume {state.name} --partition "
                "NAME` use others)"
            )
        by_reason.setdefault(f"{node.state}: {message}", []).append(node.name)
    messages += [f"{format_names(alike, 4)} {message}" for message, alike in by_reason.items()]
    return messages[:_SHOWN]


def _build_state(records: RunRecords, jobs: Jobs) -> RunState:
    run = records.run
    attempts = records.attempts
    now = time.time()
    state, reason = derive_state(records, jobs)
    if state in (*ACTIVE, "interrupted") and (message := _unwritten(run, jobs)):
        reason = "; ".join(filter(None, (message, reason)))
    row = last_row(run) or {}
    pace = read_pace(run, attempts)
    step = int(row.get("step", 0))
    eta_s = None
    total = records.config.steps
    if state == "training" and pace is not None and total is not None:
        last = records.last
        resumed = step
        # An attempt without a step of its own first recomputes what followed its checkpoint.
        if last is not None and last.ended_at is None and row.get("attempt", -1) != last.attempt:
            resumed = last.checkpoint_before or 0
        eta_s = pace.seconds(max(total - resumed, 0))
    tokens = finite_number(row, "tokens")
    checkpoints, newest = _checkpoints(run, records.config.command)
    hours = node_hours(
        run, [*records.precompiles, *attempts], state in ("precompiling", "training"), now
    )
    usd = records.config.usd_per_node_hour
    return RunState(
        name=run.name,
        run_dir=str(run.path),
        recipe=records.config.recipe,
        state=state,
        reason=reason,
        nodes=records.submission.nodes if records.submission else 0,
        step=step,
        steps=total,
        done_early=attempts[-1].done_early if state == "done" else None,
        metrics=row,
        loss=finite_number(row, "loss"),
        tokens=None if tokens is None else int(tokens),
        # Without a recent pace the last row's own throughput.
        seq_per_s=pace.seq_per_s if pace else finite_number(row, "seq_per_s"),
        step_s=pace.step_s if pace else None,
        tokens_per_s=pace.tokens_per_s if pace else finite_number(row, "tokens_per_s"),
        eta_s=eta_s,
        finish_at=None if eta_s is None else now + eta_s,
        last_checkpoint=newest and SavedCheckpoint(*newest, max(now - newest[1], 0.0)),
        checkpoints=checkpoints,
        restarts=max(len(attempts) - 1, 0),
        node_hours=hours,
        usd=None if usd is None else hours * usd,
        jobs=jobs,
        attempts=attempts,
    )


def _unwritten(run: RunDir, jobs: Jobs) -> str:
    """Return what a run cannot write now, or has not written yet, as its directory was full."""
    # Not a folder of another user, in which this process may not write.
    read_only = os.statvfs(run.path).f_flag & os.ST_RDONLY
    error = write_error(run.path) if read_only or os.access(run.path, os.W_OK) else None
    if error is not None and matches(error, "storage", "storage_lasting"):
        full = "" if read_only else "storage full, "
        return f"{full}nothing is written: {error}"
    endings = [job.unrecorded for job in jobs.values() if job.unrecorded is not None]
    return "".join(f"not recorded yet: {e.ending}: {'; '.join(e.evidence)}" for e in endings[:1])


def _damaged(run: RunDir, error: Exception) -> RunState:
    message = str(error) if isinstance(error, SlurmllmError) else repr(error)
    if isinstance(error, OSError):
        message = _unreadable(run, error)
    # a row of a table has room for no more
    return RunState(
        run.name, str(run.path), reason="; ".join(line.strip() for line in message.splitlines()[:2])
    )


def _unreadable(run: RunDir, error: OSError) -> str:
    return (
        f"cannot read {error.filename or run.path}: {os_error_text(error)}; check its permissions "
        "and the file system"
    )


def _checkpoints(
    run: RunDir, command: CommandConfig | None
) -> tuple[list[int], tuple[int, float] | None]:
    """Return the steps of all checkpoints, and step and time of the newest usable one."""
    if command is not None:
        entries = list_trainer_checkpoints(run, command)
        newest = newest_complete(entries)
        return [e.step for e in entries], newest and (newest.step, newest.changed_at)
    rollbacks = SkipsRecord.of(run).invalidations
    steps = run.checkpoint_steps()
    for step in reversed(steps):
        with suppress(StorageError):  # a save that is running, or was interrupted
            manifest = CheckpointManifest.load(run.checkpoint(step) / "manifest.json")
            if invalidation_reason(step, manifest.attempt, rollbacks) is None:
                return steps, (step, manifest.saved_at)
    return steps, None


def node_hours(run: RunDir, attempts: Attempts, running: bool, now: float) -> float:
    """Return the node hours of the attempts of both stages by their records, without accounting.

    `running`: whether the newest one is running.
    """
    newest = max(attempts, key=lambda attempt: attempt.started_at, default=None)
    seconds = []
    for attempt in attempts:
        end = attempt.ended_at
        if end is None and running and attempt is newest:
            end = now
        elif end is None:  # its supervisor was killed with its node
            end = max((beat.written_at for beat in read_heartbeats(run, attempt)), default=0.0)
            if attempt.stage == "train":
                with suppress(OSError):
                    row = last_row_of(run.metrics(attempt.attempt)) or {}
                    end = max(end, finite_number(row, "time") or 0.0)
        seconds.append(
            (len(attempt.nodes) + attempt.spare_nodes) * max(end - attempt.started_at, 0.0)
        )
    return math.fsum(seconds) / 3600


@dataclass(frozen=True)
class SweepState:
    """The current state of a sweep."""

    sweep: SweepDir
    record: SweepRecord
    runs: Sequence[RunState]  # in the order of the cases, without those that were removed
    precompile_jobs: dict[str, str | None]  # run that compiles graphs for them → its job
    precompile_hours: float  # node hours of these

    @property
    def summary(self) -> str:
        states = Counter(state.state_text.partition(",")[0] for state in self.runs)
        limit = f", {self.record.max_running} at a time" if self.record.max_running else ""
        counts = ", ".join(f"{count} {state}" for state, count in states.items())
        return f"{format_plural(len(self.runs), 'run')}{limit}: {counts}"

    def to_json(self) -> Json:
        return {
            "sweep": self.sweep.name,
            "sweep_dir": str(self.sweep.path),
            "recipe": self.record.recipe,
            "max_running": self.record.max_running,
            "states": Counter(state.state for state in self.runs),
            "precompile_jobs": self.precompile_jobs,
            "precompile_node_hours": self.precompile_hours,
            "node_hours": math.fsum(
                [self.precompile_hours, *(state.node_hours for state in self.runs)]
            ),
        }


@dataclass(frozen=True)
class RankedRun:
    """A run of a sweep with the loss that ranks it."""

    state: RunState
    values: dict[str, str]  # dotted path → value, as given
    # Mean over the last tenth of the steps; None if the run has made none, or it is not finite.
    loss: float | None

    def to_json(self) -> Json:
        fields = ("state", "reason", "step", "steps", "seq_per_s", "node_hours", "usd", "restarts")
        return {
            "run": self.state.name,
            "run_dir": self.state.run_dir,
            "values": self.values,
            "loss": self.loss,
            "last_loss": self.state.loss,
            **{name: getattr(self.state, name) for name in fields},
        }


def read_sweep(sweep: SweepDir, client: SlurmClient) -> SweepState:
    """Read the state of a sweep; raises StorageError if its record is damaged."""
    record = SweepRecord.load(sweep.record)
    runs = runs_of(sweep, record)
    compiling = sweep.graph_runs()
    submissions = {run.name: last_submission(run) for run in compiling}
    jobs = {name: last.precompile_job if last else None for name, last in submissions.items()}
    states = run_states([*runs, *compiling], client)
    return SweepState(
        sweep,
        record,
        states[: len(runs)],
        jobs,
        math.fsum(state.node_hours for state in states[len(runs) :]),
    )


def rank(state: SweepState) -> list[RankedRun]:
    """Return the runs of a sweep: those that are done, then the others, each by loss."""
    values = {case.run: case.values for case in state.record.cases}
    runs = [RankedRun(run, values[run.name], _final_loss(run)) for run in state.runs]
    return sorted(runs, key=lambda r: (r.loss is None, r.state.state != "done", r.loss or 0.0))


def _final_loss(state: RunState) -> float | None:
    losses: dict[int, float] = {}
    run = RunDir(Path(state.run_dir))
    with reading(run.path):
        for path in reversed(run.metrics_files()):
            first = min(losses, default=math.inf)  # a later attempt has recomputed what follows
            losses |= {
                row["step"]: loss
                for row in last_rows(path, _MOST_ROWS)
                if row["step"] < first and (loss := json_number(row.get("loss", ""))) is not None
            }
            if len(losses) >= _MOST_ROWS:
                break
    last = max(losses, default=0)
    used = [loss for step, loss in losses.items() if step > last * (1 - _LAST_PART)]
    mean = math.fsum(used) / len(used) if used else math.nan
    return mean if math.isfinite(mean) else None
