"""The sections of a recipe about its operation: checkpoints, guard, watchdog, Slurm.

Also what all sections are made of.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    NonNegativeInt,
    WithJsonSchema,
    model_validator,
)

from slurmllm.core.config.directives import check_options
from slurmllm.core.config.variables import refuse_reserved

EnvName = Annotated[
    str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$"), AfterValidator(refuse_reserved)
]
LARGEST = 2**40  # that no setting reaches
PositiveInt = Annotated[int, Field(gt=0, lt=LARGEST)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Section(
    BaseModel, frozen=True, extra="forbid", strict=True, protected_namespaces=(), defer_build=True
):
    """A frozen group of fields; unknown fields are faults and nothing is converted silently."""


def _number_or_auto(value: Any) -> Any:
    if value == "auto" or (type(value) is int and 0 < value < LARGEST):
        return value
    raise ValueError("must be a whole number above 0, or auto")


NumberOrAuto = Annotated[PositiveInt | Literal["auto"], BeforeValidator(_number_or_auto)]


T = TypeVar("T")
AsList = BeforeValidator(lambda value: [value] if isinstance(value, str | int | float) else value)
# A list, for which a single value may be written.
ListOf = Annotated[tuple[T, ...], Field(strict=False), AsList]


class CheckpointConfig(Section):
    """When checkpoints are written and which are kept."""

    every_steps: NumberOrAuto = 100
    """Steps between checkpoints; auto: by Young and Daly, from what a save costs and how often the
    run's nodes fail."""
    keep: PositiveInt = 3
    """Newest checkpoints kept."""
    keep_hours: NonNegativeFloat = 0.0
    """Checkpoints younger than this are kept too."""
    keep_every: PositiveInt | None = None
    """Checkpoints at multiples of this step are kept for good."""
    asynchronous: bool = False
    """Write checkpoints while training continues."""
    replica: str | None = None
    """A folder or a URL (s3://…) to which each checkpoint is copied while training continues, and
    from which a run resumes if its own directory has none."""
    replica_keep: PositiveInt = 2
    """Newest checkpoints kept in the replica."""


class GuardConfig(Section):
    """What to do when the loss is not finite or the gradient norm spikes (after HLAT)."""

    not_finite: Literal["stop", "roll_back"] = "stop"
    """At a loss or a gradient norm that is not finite."""
    spike: Annotated[
        Literal["off", "warn", "stop", "roll_back"],
        BeforeValidator(lambda value: "off" if value is False else value),  # as YAML reads off
    ] = "warn"
    """At a spike of the gradient norm that does not return."""
    factor: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 3.0
    """A gradient norm is a spike from so many times its lowest smoothed value on."""
    smoothing_steps: PositiveInt = 50
    """Steps that the smoothed gradient norm is the mean over."""
    window_steps: PositiveInt = 50
    """Steps within which a spike must return."""
    skip_batches: NonNegativeInt = 0
    """Global batches before the spike's first that a roll-back skips too."""
    max_roll_backs: NonNegativeInt = 3
    """Roll-backs of a run before it stops instead."""


class ProfileConfig(Section):
    """Which steps are profiled, into the run's `profiles/`; training stays bit-identical."""

    steps: Annotated[tuple[PositiveInt, PositiveInt], Field(strict=False)] | None = None
    """First and last profiled step; none if left out."""
    ranks: Annotated[tuple[NonNegativeInt, ...], Field(strict=False, min_length=1), AsList] = (0,)
    """Workers that are profiled."""
    memory: bool = False
    """Record allocations too: a snapshot of the memory on CUDA, in the trace on CPUs."""


COMPARED_WINDOWS = 10  # windows over which the times of ranks are compared


class WatchdogConfig(Section):
    """When a run that makes no progress counts as hung."""

    enabled: bool = True
    """Whether the supervisor watches."""
    start_up_s: PositiveFloat = 1800.0
    """Seconds for a phase of the start-up: imports, rendezvous, model, resume."""
    first_step_s: PositiveFloat = 7200.0
    """Seconds for the first step, compilation included."""
    step_factor: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 10.0
    """A step may take so many times the run's slow ones, and at least `min_step_s`."""
    min_step_s: PositiveFloat = 60.0
    """Seconds that a step may always take."""
    save_s: PositiveFloat = 1800.0
    """Seconds for a save."""
    slow_rank_s: NonNegativeFloat = 600.0
    """Report a rank that is slower than the others for so many seconds; 0: never."""

    @property
    def window_s(self) -> float:
        """Seconds over which the times of a rank are averaged before they are compared."""
        return self.slow_rank_s / COMPARED_WINDOWS


def _option_value(pattern: str, rule: str) -> BeforeValidator:
    """Accept a text, or a number that is written like one, as sbatch reads it."""

    def check(value: Any) -> str:
        option = str(value) if type(value) is int else value
        if not isinstance(option, str) or not re.fullmatch(pattern, option):
            raise ValueError(rule)
        return option

    return BeforeValidator(check)


# Seconds before the time limit: Slurm does not requeue a job that it timed out.
KILL_MARGIN_S = 30.0


def leaving_s(signal_lead_s: float) -> float:
    """Return the seconds from the signal ahead of the time limit in which workers save and exit."""
    return max(signal_lead_s - KILL_MARGIN_S, signal_lead_s / 2)


# For the schema: what the validators take.
_TEXT = WithJsonSchema({"type": ["string", "integer"]})
_TIME = _option_value(
    r"\d+|\d+:[0-5]?\d:[0-5]?\d|\d+-\d{1,2}(:[0-5]?\d){0,2}",
    "must be minutes, H:MM:SS or D-HH:MM:SS, such as 90, 8:00:00, 2-00:00:00 (Slurm reads 8:00 as "
    "eight minutes)",
)
# Without blanks, quotes or a leading dash, which could end the directive
_WORD = _option_value(
    r"[A-Za-z0-9_+.,:=@/%\[\]()|&*][A-Za-z0-9_+.,:=@/%\[\]()|&*-]*",
    "must not contain whitespace or quotes, or begin with -; write it as sinfo or scontrol shows "
    "it",
)
SlurmTime = Annotated[str, _TIME, _TEXT]
SlurmWord = Annotated[str, _WORD, _TEXT]


NotifyEvent = Literal["start", "failure", "requeue", "divergence", "slow_rank", "end"]


RestartSetting = Literal["auto", "requeue", "chain", "none"]


class NotifyConfig(Section):
    """Notifications of a run; they never delay it."""

    command: ListOf[str] = ()
    """A program and its arguments, called with the JSON on its standard input and the line of text
    in $SLURMLLM_NOTIFICATION; not from a recipe's file."""
    on: ListOf[NotifyEvent] = get_args(NotifyEvent)
    """Which: the start of an attempt; its end, as a failure that stops the run, a requeue, a
    divergence, or the end of the run; a rank that is slower than the others."""


class EvaluateConfig(Section):
    """Evaluations of checkpoints while the run trains, each in a job of its own."""

    suite: Annotated[str, Field(pattern=r"^([A-Za-z0-9_-]+|/[^\x00\r\n]*)$")] | None = None
    """Suite of `slurmllm evaluate`: the name of a shipped one, or the absolute path of a file."""
    command: Annotated[str, Field(pattern=r"\S")] | None = None
    """Instead of a suite: a command line for bash, in which {checkpoint}, {step} and {run} are
    replaced. Its scores are the last line of its output that is a JSON object of numbers."""
    every: PositiveInt = 1
    """Evaluate every Nth checkpoint, and the last step's."""
    time: SlurmTime = "4:00:00"
    """Time limit of a job; set other options of sbatch in slurm.directives.evaluate."""
    hold_hours: NonNegativeFloat = 24.0
    """Hours for which a checkpoint is kept until it has been evaluated."""

    @model_validator(mode="after")
    def _has_one_evaluator(self) -> EvaluateConfig:
        if (self.suite is None) == (self.command is None):
            raise ValueError("needs either a suite or a command")
        return self


_VALUES = ["string", "number", "boolean", "array", "null"]
StageOptions = Annotated[
    dict[str, str | bool],
    BeforeValidator(check_options),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": _VALUES}}),
]


class Directives(Section):
    """Further options of sbatch and srun, without their dashes: {constraint: a100, gres: gpu:8}."""

    train: StageOptions = Field(default_factory=dict)
    """For sbatch, of the train job."""
    precompile: StageOptions = Field(default_factory=dict)
    """For sbatch, of the precompile job."""
    evaluate: StageOptions = Field(default_factory=dict)
    """For sbatch, of `evaluate --slurm`."""
    srun: StageOptions = Field(default_factory=dict)
    """For srun, in both jobs."""


# type:job ids, such as afterok:12:13; several, separated by commas (all) or ? (any).
_JOBS = r"(singleton|after[a-z]*(:\d+([_+]\d+)*)+)"
Dependency = Annotated[str, Field(pattern=rf"^{_JOBS}([,?]{_JOBS})*$")]


class SlurmConfig(Section):
    """Slurm options of the batch scripts, and limits on restarts."""

    time: SlurmTime = "1-00:00:00"
    """Time limit of the train job: minutes, H:MM:SS or D-HH:MM:SS."""
    precompile_time: SlurmTime = "2:00:00"
    """Time limit of the precompile job."""
    signal_lead_s: Annotated[int, Field(ge=0, le=65535)] = 300
    """Seconds before the time limit at which the run saves and exits."""
    partition: SlurmWord | None = None
    """Partition."""
    account: SlurmWord | None = None
    """Account."""
    qos: SlurmWord | None = None
    """Quality of service."""
    reservation: SlurmWord | None = None
    """Reservation."""
    exclude: SlurmWord | None = None
    """Nodes to exclude."""
    restart: RestartSetting = "auto"
    """How a run continues after the end of its job: requeue (the same job), chain (a successor job,
    submitted ahead of the end) or none (it stops). auto: requeue if the site permits it, else
    chain."""
    restart_in_allocation: bool = True
    """Whether new workers start in the same job after a failure, if it has enough healthy nodes."""
    min_nodes: Annotated[int, Field(ge=1)] | None = None
    """Fewest nodes that the train job starts with, if Slurm has no more; --nodes 2-4 sets it."""
    spare_nodes: NonNegativeInt = 0
    """Nodes that the train job holds in addition, to replace others without leaving the allocation.
    """
    dependency: Dependency | None = None
    """What the first job of a submission waits for, as sbatch's --dependency: afterok:12."""
    directives: Directives = Directives()
    failure_budget: NonNegativeInt = 20
    """Restarts after node failures within slurm.budget_hours before the run stops."""
    hang_budget: NonNegativeInt = 5
    """Likewise, after hangs."""
    storage_budget: NonNegativeInt = 3
    """Likewise, after failures of the shared file system; also the starts in a row that may fail
    because the run's directory cannot be written."""
    budget_hours: PositiveFloat = 24.0
    """Hours back over which failures are counted."""
    backoff_s: NonNegativeFloat = 30.0
    """Seconds that a requeued job waits after an attempt without a new checkpoint; doubled after
    each further one, up to an hour."""
    no_progress_limit: PositiveInt = 3
    """Attempts in a row without a new checkpoint before the run stops."""
    exclude_hours: NonNegativeFloat = 24.0
    """The longest exclusion of a node that failed, in hours: the first takes one hour, each further
    one four times as long."""
    drain: bool = False
    """Whether a node whose hardware is broken is drained too, if Slurm permits it to this user."""
    exclude_slow: bool = False
    """Whether a restart excludes a node on which a rank was slow for an hour."""
    notify: NotifyConfig = NotifyConfig()
