"""The schemas of the files that stages exchange through the run directory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, Field, ValidationError

from slurmllm.core.errors import Blame, StorageError
from slurmllm.core.format import Texts, format_duration
from slurmllm.core.run.rundir import (
    RUN_NAME,
    AttemptDir,
    RunDir,
    SweepDir,
    storage_errors,
    write_atomic,
)
from slurmllm.core.run.safe_files import read_limited

EndingClass = Literal[
    "done",  # the final step was reached
    "advance_signal",  # time limit or preemption: saved and left on the advance signal
    "node_failure",  # a node, its hardware or the network between nodes
    "hang",  # no progress within the watchdog's limit
    "out_of_memory",  # host or device memory
    "compile_failure",  # a graph that does not compile, or has no compiled artifact
    "bad_configuration",  # an error whose blame is the user's
    "storage_failure",  # disk full, a damaged file
    "code_error",  # an exception in code
    "divergence",  # a loss that is not a number
    "stale_graphs",  # a loss that is not a number at the first step after graphs were reused
    "no_progress",  # several attempts in a row without a new checkpoint
    "cancelled",  # the job was cancelled
    "superseded",  # a later attempt took over
]
Action = Literal[
    "finish",
    "restart",  # new workers in the same allocation
    "requeue",  # the job returns to the queue
    "chain",  # a successor job continues
    "stop",
]
_UNRECORDED = "slurmllm: not recorded yet: "  # in a job's comment
Actions = tuple[Action, ...]
CONTINUES: Actions = ("restart", "requeue", "chain")
# How a run continues after the end of its job: `slurm.restart` without `auto`.
Restart = Literal["requeue", "chain", "none"]
# What the node hours of a run went to; each second of an allocation has one of these.
TimePart = Literal[
    "productive",  # steps that the run kept, each counted once
    "recomputation",  # steps that were lost and computed again, or would have to be
    "saving",  # training waited for a checkpoint
    "evaluation",  # training waited for an evaluation
    "first_step",  # extra time of first steps: compiling, loading graphs
    "start_up",  # from the allocation to the first step, less preflight and cache
    "preflight",  # checks of the nodes
    "cache",  # broadcast of graphs to the nodes, beyond the preflight
    "precompile",  # the precompile stage
    "idle",  # the rest: an unnoticed failure, a stop, Slurm's own end, spare nodes
]
TIME_PARTS: tuple[TimePart, ...] = get_args(TimePart)
# Whose fault a message of Slurm reports (docs/endings.md); `result`: only how tasks ended.
Fault = Literal[
    "request",
    "user",
    "memory",
    "storage",
    "node",
    "network",
    "controller",
    "site",
    "job",
    "limit",
    "result",
    "unknown",
]
# What a worker is doing: `stepping` from the second step of an attempt on.
Phase = Literal[
    "starting", "resuming", "first_step", "stepping", "evaluating", "saving", "stopping"
]

# Both become arguments of Slurm's commands, and names of files; files of a run can be damaged, or
# be written by others. An id may be that of an array's task or of a part of a heterogeneous job.
JobId = Annotated[str, Field(pattern=r"^[0-9]{1,18}(_[0-9]{1,18})?(\+[0-9]{1,18})?$")]
NodeName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,254}$")]
ByName = dict[str, str]
Versions = ByName  # by name of the library or driver
ByRank = dict[int, int]
Ranks = tuple[int, ...]
PhaseSeconds = dict[str, float]
Lines = Texts
NodeNames = tuple[NodeName, ...]
RunName = Annotated[str, Field(pattern=rf"^{RUN_NAME.pattern}$")]
# Not 0 and not negative: kill(2) takes these for groups of processes. proc(5): at most 2^22.
ProcessId = Annotated[int, Field(gt=0, le=1 << 22)]
Seconds = Annotated[float, Field(gt=-1e10, lt=1e10)]  # 300 years: sums are finite


# Unknown fields are ignored: a run directory outlives the version that wrote it.
class Record(BaseModel, frozen=True, extra="ignore", populate_by_name=True, defer_build=True):
    """A file of the run directory."""

    def save(self, path: Path) -> None:
        write_atomic(path, self.model_dump_json(indent=2, by_alias=True) + "\n")

    @classmethod
    def load(cls, path: Path, *, trusted: bool = False, group: str | None = None) -> Self:
        """Read a record; raises StorageError if the file is unreadable or no such record.

        `trusted`: only this user, or members of `group`, may have written it.
        """
        with storage_errors(f"cannot read {path}"):
            content = read_limited(path, trusted=trusted, group=group)
        try:
            return cls.model_validate_json(content)
        except ValidationError as error:
            fix = "" if trusted else "; restore it or start a new run"  # graphs are compiled again
            raise StorageError(f"{path} is damaged: {first_problem(error)}{fix}") from error

    @classmethod
    def find(cls, path: Path) -> Self | None:
        """Read a record; None if there is no such file. Raises as `load` does."""
        try:
            path.lstat()  # not `is_file`: a pipe in the file's place is damage
        except FileNotFoundError:
            return None
        except OSError:
            pass  # `load` names the reason
        return cls.load(path)

    @classmethod
    def find_readable(cls, path: Path) -> Self | None:
        """Read a record; None if there is no such file, or it cannot be read."""
        with suppress(StorageError):
            return cls.find(path)
        return None

    @classmethod
    def load_known(cls, path: Path) -> tuple[Self, Lines]:
        """Read a record of a newer version, without its unknown values; returns these too."""
        try:
            return cls.load(path), ()
        except StorageError as error:
            if not isinstance(error.__cause__, ValidationError):
                raise
            faults = error.__cause__.errors()
            unknown = {str(e["loc"][0]): e.get("input") for e in faults if e["loc"]}
            try:
                fields = json.loads(read_limited(path)).items()
                record = cls.model_validate({k: v for k, v in fields if k not in unknown})
            except (OSError, ValueError, AttributeError, RecursionError):
                raise error from error.__cause__
        return record, tuple(f"{name} is {value!r:.40}" for name, value in unknown.items())


def first_problem(error: ValidationError, whole: str = "the file") -> str:
    """Return the first problem, such as `slurm.nodes: Input should be …`.

    `whole` replaces the field name if the problem belongs to no single field.
    """
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or whole}: {first['msg']}"


class Submission(Record):
    """One call of `submit` or `resume`."""

    submitted_at: float  # Unix time, s
    nodes: int
    local: bool  # ran on this machine without Slurm
    first_attempt: int  # the train attempt that this submission begins with
    precompile_job: JobId | None = None  # job id, None if skipped
    train_job: JobId | None = None
    pid: ProcessId | None = None  # process of a local submission
    process: str | None = None  # its `process_identity`
    host: str | None = None  # machine of a local submission
    cancelled_at: float | None = None  # Unix time of `cancel`, s
    ended_at: float | None = None  # local: Unix time of the end of its process, unless killed, s
    from_scratch: bool = False  # earlier checkpoints are not used
    # Settings of the recipe that this `resume` changed: dotted path → old and new value.
    changes: dict[str, tuple[Any, Any]] = {}
    restart: Restart = "requeue"
    # chain: the jobs before train_job, oldest first, and the one that follows it.
    earlier_jobs: tuple[JobId, ...] = ()
    successor_job: JobId | None = None
    # Of the folder's repository; only if the run has trackers.
    git_commit: str | None = Field(default=None, max_length=200)
    # Run of the same sweep whose precompile job, `precompile_job`, compiles the graphs of this one.
    graphs_of: RunName | None = None
    # Job name that train jobs of a sweep share: Slurm runs jobs of one name one after the other
    # (`--max-running`, --dependency=singleton).
    lane: str | None = None
    allocation: JobId | None = None  # job that held the nodes (`--in-allocation`)

    @property
    def own_jobs(self) -> list[str]:
        """The present jobs that serve no other run, those that wait for others first."""
        jobs = (
            self.successor_job,
            self.train_job,
            None if self.graphs_of is not None else self.precompile_job,
        )
        return [job for job in jobs if job is not None]

    @property
    def jobs(self) -> ByName:
        """Its present Slurm jobs: precompile, train, successor → job id."""
        names = ("precompile", "train", "successor")
        return {name: job for name in names if (job := getattr(self, f"{name}_job")) is not None}


class JobsRecord(Record):
    """`jobs.json`: every submission of a run, oldest first."""

    submissions: tuple[Submission, ...] = ()

    @classmethod
    def of(cls, run: RunDir) -> Self:
        """Return the record of a run, empty if it was never submitted; raises as `load` does."""
        return cls.find(run.jobs) or cls()

    @property
    def last(self) -> Submission | None:
        return self.submissions[-1] if self.submissions else None

    @property
    def created_at(self) -> float:
        """Unix time of the first submission; 0 without one."""
        return min((submission.submitted_at for submission in self.submissions), default=0.0)

    @classmethod
    def last_of(cls, run: RunDir) -> Submission:
        return cls.load(run.jobs).submissions[-1]

    @classmethod
    def change_last(cls, run: RunDir, **changes: object) -> Submission:
        """Change and return the last submission of a run; the caller holds the run's lock."""
        *before, last = cls.load(run.jobs).submissions
        last = last.model_copy(update=changes)
        cls(submissions=(*before, last)).save(run.jobs)
        return last


def last_submission(run: RunDir) -> Submission | None:
    return JobsRecord.of(run).last


class SweepCase(Record):
    """One run of a sweep."""

    run: RunName
    values: ByName  # dotted path → value, as given


class SweepRecord(Record):
    """`sweep.json`: what a sweep was submitted with."""

    recipe: str
    created_at: float  # Unix time, s
    max_running: int | None = None  # how many of its runs train at a time; None: no limit
    # The process that submits it or, if local, runs it; its `process_identity`; its machine.
    pid: ProcessId | None = None
    process: str | None = None
    host: str | None = None
    cases: tuple[SweepCase, ...]

    @property
    def labels(self) -> ByName:
        """Dotted path of each value → its last part, or the path if several have that part."""
        last = {path: path.rpartition(".")[2] for case in self.cases for path in case.values}
        names = list(last.values())
        return {path: name if names.count(name) == 1 else path for path, name in last.items()}


def runs_of(target: RunDir | SweepDir, record: SweepRecord | None = None) -> list[RunDir]:
    """Return a run, or the runs of a sweep in the order of its cases, without removed ones."""
    if isinstance(target, RunDir):
        return [target]
    runs = (target.run(case.run) for case in (record or SweepRecord.load(target.record)).cases)
    return [run for run in runs if run.path.is_dir() and not run.only_checkpoints()]


class LockRecord(Record):
    """`lock.json`: the command that changes the run now; its user is the file's."""

    verb: str = Field(max_length=40, pattern=r"^[a-z-]+$")
    host: NodeName  # machine of the command
    pid: ProcessId  # its process id
    process: str | None  # its `process_identity`
    since: float  # Unix time, s


class LaunchFailure(Record):
    """A command on the nodes that failed before they reported, as srun explains it."""

    command: str
    exit_code: int  # negative: ended by that signal
    seconds: Seconds  # from its start to its end
    message: str  # Slurm's line that explains most; empty if it printed none
    fault: Fault
    options: Texts = ()  # that the message is about, such as `--mem=900G`
    nodes: NodeNames = ()  # that messages of this fault name

    @property
    def accused(self) -> NodeNames:
        """The nodes of which the messages tell a fault: a request that names one accuses none."""
        return self.nodes if self.fault in ("node", "network") else ()

    @property
    def text(self) -> str:
        message = self.message or "the launchers ended without a report"
        program = Path(self.command.partition(" ")[0]).name
        return f"{message} ({program}: exit code {self.exit_code} after {self.seconds:.1f} s)"


class PassedOver(Record):
    """A broken checkpoint of another project's trainer, from which an attempt did not resume."""

    step: int
    path: str
    reason: str
    moved_to: str | None = None  # so that its trainer does not load it

    def __str__(self) -> str:
        moved = f"; moved to {self.moved_to}" if self.moved_to else ""
        return f"step {self.step}, {self.path}: {self.reason}{moved}"


class AttemptRecord(Record):
    """`attempts/NNN/attempt.json`: the nodes of an attempt, how it ended and why."""

    attempt: int
    stage: Literal["precompile", "train"]
    job_id: JobId | None  # Slurm job id; None for a local run
    restart_count: int = 0  # SLURM_RESTART_COUNT
    host: str | None = None  # machine of the supervisor
    pid: ProcessId | None = None  # process id of the supervisor
    process: str | None = None  # its `process_identity`
    nodes: NodeNames
    spare_nodes: int = Field(default=0, ge=0, lt=1 << 20)  # that the job holds in addition
    world_size: int
    master_addr: str
    master_port: int
    control_port: int = 0  # of the control plane, on the first node
    started_at: float  # Unix time, s
    ended_at: float | None = None
    ending: EndingClass | None = Field(default=None, alias="class")
    action: Action | None = None
    evidence: Lines = ()
    blamed_nodes: NodeNames = ()
    excluded_nodes: NodeNames = ()  # nodes with evidence of a fault: excluded from later jobs
    launch_failure: LaunchFailure | None = None  # if the launchers or the checks did not start
    # Of a command that ended with 0 before its last step: last step by its log, `command.steps`
    done_early: tuple[int, int] | None = None
    first_step: int | None = None  # first step that this attempt made
    last_step: int | None = None
    checkpoint_before: int | None = None  # newest step at the start
    checkpoint_path: str | None = None  # of a trainer of another project: that of this step
    passed_over: tuple[PassedOver, ...] = ()  # newer broken checkpoints, newest first
    checkpoint_after: int | None = None  # newest step at the end
    steps_gained: int | None = None  # steps that its checkpoints hold
    steps_lost: int | None = None  # steps to be recomputed
    backoff_s: float = 0.0  # minimum wait of the requeued job
    # Seconds of queue, preflight, cache, start_up, first_step, training, saving and stopping;
    # `workers`: from the launchers' start to their end.
    phases_s: PhaseSeconds = {}
    new_graphs: Texts = ()  # graphs compiled in training that the archive lacked

    @property
    def early_text(self) -> str:
        """`done early, 60 of 80`; empty if it made its last step, or did not end with 0."""
        return "done early, {} of {}".format(*self.done_early) if self.done_early else ""

    def files(self, run: RunDir) -> AttemptDir:
        return run.attempt(self.stage, self.attempt)


Attempts = Sequence[AttemptRecord]


class UnrecordedEnding(Record):
    """An ending that the full run directory did not take, kept in its job's comment."""

    stage: Literal["precompile", "train"]
    attempt: int
    ended_at: float  # Unix time, s
    ending: EndingClass = Field(alias="class")
    evidence: Lines = ()
    blamed_nodes: NodeNames = ()

    @classmethod
    def of_comment(cls, comment: str) -> Self | None:
        """Read what `comment_with` has added; None without one."""
        try:
            return cls.model_validate_json(comment.partition(_UNRECORDED)[2])
        except ValidationError:
            return None


def comment_with(ending: UnrecordedEnding | None, comment: str) -> str:
    """Return a job's comment with an ending in place of an earlier one."""
    before = comment.partition(_UNRECORDED)[0]
    return (
        before if ending is None else before + _UNRECORDED + ending.model_dump_json(by_alias=True)
    )


class WorkerPhase(Record):
    """What a worker is doing."""

    phase: Phase
    step: int  # last one finished; 0 before the first
    since: float  # Unix time at which this phase of this step began, s
    window: int = 0  # number of its last window of steps; 0: none yet
    own_s: Seconds = 0.0  # mean time of a step without waits for other ranks, in that window


WorkerPhases = dict[int, WorkerPhase]  # by rank


class Heartbeat(Record):
    """`attempts/NNN/heartbeats/<node>.json`: what a node's workers are doing."""

    node: NodeName
    written_at: float  # Unix time, s
    ranks: WorkerPhases


class HangRecord(Record):
    """`attempts/NNN/hang.json`: found by the watchdog; launchers then dump stacks and end."""

    found_at: float  # Unix time, s
    phase: Phase  # of the workers that are furthest behind
    step: int  # last one that they finished
    waited_s: float  # since they began that phase
    limit_s: float
    behind: Ranks = ()  # ranks; empty if all are equal
    unresponsive_nodes: NodeNames = ()  # the nodes whose launchers stopped responding
    suspects: NodeNames = ()  # nodes blamed for the hang
    # Set at the end of the attempt, from torch's Flight Recorder and NCCL's RAS: the operations in
    # which ranks wait, and the ranks that have not joined them.
    collectives: Lines = ()
    missing: Ranks = ()


class SlowRank(Record):
    """A rank that takes longer for a step than others with the same work."""

    rank: int
    node: NodeName
    ratio: float  # of its time without waits to the median
    peers: int  # number of ranks with the same work, this one included
    since: float  # Unix time, s

    def text(self, now: float) -> str:
        return (
            f"rank {self.rank} on {self.node} takes {self.ratio:.2f} × the median time of "
            f"{self.peers} ranks, for {format_duration(now - self.since)}"
        )


class SlowRanksRecord(Record):
    """`attempts/NNN/slow_ranks.json`: written by the supervisor once ranks can be compared."""

    ranks: tuple[SlowRank, ...] = ()


class SkippedBatches(Record):
    """A range of batches that a run skips."""

    first: int  # global batch that the stream hands out, from 1
    last: int
    roll_back_to: int | None  # checkpoint's step; None: start from step 0
    onset: int  # first step of the divergence
    attempt: int  # whose checkpoints from the onset on are invalidated
    reason: str


class RejectedCheckpoint(Record):
    """A checkpoint that made the loss wrong after a resume, and those that this attempt saved."""

    onset: int  # step of the checkpoint
    attempt: int  # that resumed from it
    until: float  # end of the attempt, Unix time, s: later checkpoints are valid
    reason: str


class SkipsRecord(Record):
    """`skips.json`: the roll-backs of a run, oldest first."""

    skips: tuple[SkippedBatches, ...] = ()
    rejected: tuple[RejectedCheckpoint, ...] = ()

    @classmethod
    def of(cls, run: RunDir) -> Self:
        """Return the record of a run, empty without a roll-back; raises as `load` does."""
        return cls.find(run.skips) or cls()

    @property
    def invalidations(self) -> tuple[SkippedBatches | RejectedCheckpoint, ...]:
        return *self.skips, *self.rejected


class Event(Record):
    """One line of `events/attempt_NNN.jsonl`: something that happened apart from the steps."""

    kind: Literal[
        "save",
        "save_skipped",
        "copied",
        "evaluation",
        "memory",
        "spike",
        "spike_over",
        "not_finite",
        "interval",
    ]
    step: int
    attempt: int
    time: float  # Unix time, s
    message: str = ""  # for people
    seconds: Seconds | None = None  # save, copied, evaluation: from begin to end
    waited_s: Seconds | None = None  # save, evaluation: of it, that training waited
    bytes: int | None = None  # save, copied: of all workers
    # What else was measured; evaluation: the loss of each text by name, nats.
    values: dict[str, float] = {}


WAITS = ("save", "evaluation")  # kinds of events for which training waits, `waited_s`


class NodeRecord(Record):
    """`attempts/NNN/nodes/<node>.json`: a node's launcher and its workers."""

    node: NodeName
    # Graphs: not needed, on this disk already, from the broadcast archive, read from the shared
    # file system, or not used: the archive was built in another environment, or a step
    # with its graphs went wrong.
    cache: Literal["none", "present", "broadcast", "shared", "other_versions", "rejected"] = "none"
    cache_reason: str = ""  # why the archive is not used
    cache_s: float = 0.0  # seconds to put the graphs in place
    compile_s: float = 0.0  # precompile: of the compiler, after steps
    # The workers' variables of backend, profile and recipe on this node; unset ones are missing.
    environment: ByName = {}
    versions: Versions = {}  # of driver, runtime, …
    graphs: Texts = ()  # precompile: folders in the cache
    # Names of the graphs that this node compiled in training and submitted.
    new_graphs: Texts = ()
    pids: ByRank = {}  # rank → process id
    log_folder: str | None = None  # on its disk, with the logs of ranks that are not collected yet
    # Rank → exit code; negative: ended by that signal.
    exit_codes: ByRank = {}
    # The ranks that the launcher itself ended, after another's failure.
    stopped_ranks: Ranks = ()
    # Of another project's trainer: rank → Unix time of the end of the first worker that exited with
    # 0, or of the first process that a command started, if others ran then. Empty or one.
    ended_first: dict[int, float] = {}
    oom_kills: int = 0  # processes that the kernel ended meanwhile for want of memory
    progress_missing: str = ""  # why no steps of another project's trainer are known
    error: str | None = None  # why the launcher itself failed
    error_code: int | None = None  # the exit code of that error's class


NodeRecords = Mapping[str, NodeRecord]  # by name of the node


class Finding(Record):
    """The result of one check of a node, of Slurm or of the installation."""

    check: str
    status: Literal["ok", "warn", "fail", "skipped"]
    value: int | float | str  # what was measured or found
    expected: int | float | str = ""  # by the profile; empty: anything
    message: str = ""  # value and limit in one phrase, for display
    fix: str = ""  # what to do about it; empty: nothing
    blame: Blame | None = None  # who can fix a failed check


class NodeHealth(Record):
    """`attempts/NNN/health/<node>.json`: what the checks of a node found before the start."""

    node: NodeName
    findings: tuple[Finding, ...] = ()
    versions: Versions = {}  # as in NodeRecord
    checks_s: float | None = None  # s; None: not finished

    def of(self, *statuses: str) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.status in statuses)


NodeHealths = Mapping[str, NodeHealth]  # by name of the node
# Why a node is excluded, strongest first: a user excluded it; its devices reported an error; it
# failed a health check; its state in Slurm; srun starts no process there; a rank there was slow for
# long; blamed for two failures in a row while other nodes worked.
NodeEvidence = Literal["user", "hardware", "check", "slurm", "no_answer", "slow", "repeated"]


class ExcludedNode(Record):
    """An excluded node."""

    node: NodeName
    reason: str = ""
    evidence: NodeEvidence | None = None  # None: recorded by an earlier version
    exclusions: int = 1  # of this node by the run, this one included
    since: Seconds  # Unix time
    until: Seconds  # Unix time
    cluster: str = Field(default="", max_length=100)  # Slurm's ClusterName; empty if unknown
    checks: Texts = Field(default=(), max_length=100)  # health checks that failed


Exclusions = tuple[ExcludedNode, ...]


class ExcludedNodes(Record):
    """`excluded.json`: the nodes that failed a run, with those whose time is over."""

    nodes: Exclusions = ()
    # Node → Unix time of `--include`: the run ignores other runs' exclusions from before.
    included: dict[NodeName, Seconds] = {}


class SiteNodeRecord(ExcludedNode):
    """`.nodes/<node>.<source>.json` in the runs folder: an exclusion for all runs, or its end.

    `cleared` (by a user) and `healthy` (it passed `checks`) end earlier exclusions.
    """

    kind: Literal["excluded", "cleared", "healthy"]
    run: RunName | None = None  # that excluded the node; None: a user did
    user: str = ""  # owner of the file


class FailureRecord(Record):
    """`attempts/NNN/failures/rank_RRRRR.json`: why a worker failed, as it reported."""

    rank: int
    node: NodeName
    error: str  # name of the exception's class
    message: str
    blame: Literal["user", "infrastructure", "code"]
    exit_code: int
    step: int | None = None
    time: float  # Unix time, s
    traceback: str = ""
    # What failed, if not the worker itself: `rank 3`, which its command started, or `the command`.
    process: str = Field(default="", max_length=40)

    @property
    def origin(self) -> str:
        """`rank 3 on n4`."""
        return f"{self.process or f'rank {self.rank}'} on {self.node}"


class WorkerRecord(Record):
    """`attempts/NNN/workers/rank_RRRRR.json`: start-up and graph cache of a node's first worker."""

    rank: int
    node: NodeName
    start_up_s: float  # from the worker's start to the first step's start
    first_step_s: float  # duration of the first step, compilation included
    cache_hits: int
    cache_misses: int
    resumed_from: int | None = None  # checkpoint's step
    skipped_checkpoints: Lines = ()  # newer, with reasons


class MetricsRow(Record):
    """One line of `metrics/attempt_NNN.jsonl`: one optimizer step of our trainer.

    The rows of other trainers (`supervise/progress.py`) have of it what these log, when they log.
    """

    step: int  # from 1
    attempt: int
    loss: float  # mean over the global batch's tokens, nats
    grad_norm: float  # 2-norm over all parameters, before clipping
    param_norm: float  # 2-norm over all parameters, after the step
    lr: float
    tokens: int  # trained on so far, this step included
    seq_per_s: float
    tokens_per_s: float
    step_time_s: float
    data_wait_s: float = 0.0  # of it, until rank 0 had its sequences
    # Of it, from there until rank 0 had the loss; None if the device runs ahead.
    forward_backward_s: float | None = None
    optimizer_s: float | None = None  # of it, until it had the norms
    time: float  # Unix time at the step's end, s
