"""The section `command` of a recipe: a trainer of another project, which slurmllm only supervises.

Such a recipe has none of the sections that describe a training; who reads one is told so.
"""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Mapping, Sequence
from functools import cache, partial
from itertools import islice, pairwise, takewhile
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import AfterValidator, BaseModel

from slurmllm.core.config.operation import PositiveInt, Section
from slurmllm.core.config.profiles import name_of
from slurmllm.core.errors import ConfigError

S = TypeVar("S", bound=BaseModel)

# What is filled into a command's texts; anything else in braces is left as it is.
PLACEHOLDERS = ("run", "attempt", "step", "checkpoint", "nodes", "devices")
_PLACEHOLDER = re.compile(rf"\{{({'|'.join(PLACEHOLDERS)})\}}")
_SPLIT = re.compile(rf"({_PLACEHOLDER.pattern.replace('(', '(?:')})")
# Programs whose subcommand starts torchrun or accelerate
_STARTING = """tune run
fabric run
lightning run
llamafactory-cli train
axolotl train
xtuner train
colossalai run
swift sft
swift pt
swift rlhf
megatron sft
megatron pt
megatron rlhf
lmf train
trl sft
trl dpo
trl grpo
trl kto
trl reward
trl rloo"""
# Of a command line for bash: what it leaves as it is, or quotes, a comment, a placeholder.
_PIECES = re.compile(
    r"\\.|(?P<quoted>\$'(?:\\.|[^'\\])*|'[^']*|\"(?:\\.|[^\"\\])*|`[^`]*)['\"`]?|(?<!\S)#[^\n]*|"
    + _PLACEHOLDER.pattern,
    re.DOTALL,
)
_FIRST_ARGUMENTS = 6  # of a command line, such as `KEY=1 uv run python -m torch.distributed.run`
_LAUNCHERS = """
torchrun accelerate accelerate-launch deepspeed composer
mpirun mpiexec mpiexec.hydra prterun orterun horovodrun
torch.distributed.run torch.distributed.launch accelerate.commands.launch deepspeed.launcher.runner
composer.cli composer.cli.launcher paddle.distributed.launch
"""
# Sections of our own trainers that a recipe with a command does not have.
REFUSED = (
    "model",
    "train",
    "optim",
    "data",
    "eval",
    "parallel",
    "layouts",
    "guard",
    "profile",
    "hooks",
    "plugins",
)

# Of a command that ended before `command.steps`
STEPS_NOT_PASSED = "the command makes its own number of steps; command.steps is not passed to it"


def _save_signal(name: str) -> str:
    short = name.upper().removeprefix("SIG")
    if short != "NONE" and f"SIG{short}" not in signal.Signals.__members__:
        raise ValueError("must be none, or a signal such as USR1 or TERM")
    return "none" if short == "NONE" else short


def _checkpoints(pattern: str) -> str:
    if pattern.count("{step}") > 1:
        raise ValueError("must have {step} once; write * for the other parts that vary")
    return pattern


def _one_line(value: str) -> str:
    if not value.strip() or "\x00" in value:
        raise ValueError("must not be empty")
    return value


class CommandConfig(Section):
    """How a trainer is started, continued and observed."""

    run: Annotated[str, AfterValidator(_one_line)]
    """The command line, for bash; {run}, {attempt}, {step}, {checkpoint}, {nodes} and {devices} are
    filled in: the run's directory, the attempt's number from 0, step and path of the newest
    complete checkpoint, nodes, devices of a node."""
    start: Literal["auto", "device", "node"] = "auto"
    """device: a process for each device, with torchrun's variables; node: one on each node, which
    starts the others itself; auto: node for torchrun, accelerate, deepspeed, composer and mpirun,
    else device."""
    folder: str | None = None
    """Working directory; by default that of `submit`."""
    resume: str | None = None
    """Added to the command from the second attempt on; with {checkpoint} or {step} in it, only if
    there is a complete checkpoint. Left out: the trainer resumes by itself."""
    save_signal: Annotated[str, AfterValidator(_save_signal)] = "none"
    """Sent slurm.signal_lead_s before the time limit, for the trainer to save and exit; none: it is
    ended then, and continues from its newest checkpoint."""
    checkpoints: Annotated[str, AfterValidator(_checkpoints)] | None = None
    """Its checkpoints: a path with {step}, and * for other parts; they are only read, unless
    checkpoint.keep is set, which takes a path below {run}/."""
    completion_file: str | None = None
    """File in a checkpoint that completes it. Left out: a whole file of torch.save is complete, and
    another checkpoint when it has not changed for ten seconds."""
    tracker: str | None = None
    """The file by which the trainer finds its newest checkpoint: latest_checkpointed_iteration.txt
    has the step, any other file the folder's name; a path with {checkpoint} is a link. Before a
    resume it is set to the newest checkpoint that verifies."""
    verify: bool = True
    """Verify checkpoints by their format before a resume, and pass over the broken ones."""
    progress: str | None = None
    """Where its steps are read: a format of text (torchtitan, megatron, …) or a regular expression
    with the groups step and loss, for the output of rank 0 (megatron: of the last one); or a file
    or folder of metrics. By default any known format in the output."""
    steps: PositiveInt | None = None
    """Steps to the end, if known: for the time left."""

    @property
    def names_checkpoint(self) -> bool:
        """Whether its command line names the checkpoint; else the trainer finds the newest."""
        line = f"{self.run} {self.resume}"
        return "{checkpoint}" in line or "{step}" in line

    @property
    def one_per_node(self) -> bool:
        """Whether it is started once on each node; auto: if it then starts the others."""
        if self.start != "auto":
            return self.start == "node"
        try:
            arguments = shlex.split(self.run)
        except ValueError:
            return False
        program = takewhile(lambda argument: not argument.endswith((".py", ".sh")), arguments)
        names = [Path(argument).name for argument in islice(program, _FIRST_ARGUMENTS)]
        pairs = {f"{first} {second}" for first, second in pairwise(names)}
        return bool({*_LAUNCHERS.split()} & {*names} or {*_STARTING.splitlines()} & pairs)

    @property
    def stop_signal(self) -> signal.Signals | None:
        """The signal that asks it to save; None if it has none."""
        return None if self.save_signal == "none" else signal.Signals[f"SIG{self.save_signal}"]


class WorkerTraits(NamedTuple):
    """What a recipe's workers run, and what slurmllm lacks of it."""

    has_model: bool  # slurmllm trains it: model, batches, mesh, checkpoints and metrics are its own
    steps: int | None  # to the end, if a command says so
    one_per_node: bool = False  # a process that starts a node's others


def join_arguments(arguments: Sequence[str]) -> str:
    """Return a command line as one text for bash; a single argument is that text already."""
    if len(arguments) == 1:
        return arguments[0]
    return " ".join(
        "".join(piece if _PLACEHOLDER.fullmatch(piece) else shlex.quote(piece) for piece in parts)
        for parts in (list(filter(None, _SPLIT.split(argument))) or [""] for argument in arguments)
    )


def fill(template: str, values: Mapping[str, object], *, quote: bool = False) -> str:
    """Replace placeholders that have a value; `quote`: for a shell.

    Raises:
        ConfigError: A placeholder is in quotes, and its value needs other ones.
    """

    def value(match: re.Match[str], in_quotes: bool = False) -> str:
        name = match[match.lastindex or 1]
        if name not in values:
            return match[0]
        filled = str(values[name])
        quoted = shlex.quote(filled) if quote else filled
        if in_quotes and quoted != filled:
            raise ConfigError(
                f"{{{name}}} is in quotes in the command, and its value {filled!r} needs quotes of "
                "its own; leave those of the command out: it is quoted when it is filled in"
            )
        return quoted

    def piece(match: re.Match[str]) -> str:
        if match["quoted"] or "<<" in template:  # a here-document quotes too
            return _PLACEHOLDER.sub(partial(value, in_quotes=True), match[0])
        return value(match) if _PLACEHOLDER.fullmatch(match[0]) else match[0]

    return _PIECES.sub(piece, template) if quote else _PLACEHOLDER.sub(value, template)


def name_of_command(arguments: Sequence[str]) -> str:
    """Return a recipe's name for a command line: that of its script or module."""
    scripts = [argument for argument in arguments if argument.endswith((".py", ".sh"))]
    modules = [after for argument, after in pairwise(arguments) if argument == "-m"]
    name = Path((scripts or modules or arguments[:1])[0]).name
    return name_of(name.removesuffix(".py").removesuffix(".sh"), "command")


@cache  # so that equal recipes are equal
def absent_section(section: type[S], name: str) -> S:
    """Return a section of a recipe with a command instead; who reads a value gets a ConfigError."""

    def refuse(self: BaseModel, field: str) -> Any:
        if field in section.model_fields:
            raise ConfigError(
                f"{name}.{field} is needed here, and the recipe has a command in place of the "
                f"section {name}: its trainer is not slurmllm's"
            )
        raise AttributeError(field)

    kind: type[S] = type(f"_No{section.__name__}", (section,), {"__getattr__": refuse})
    empty = kind.model_construct()
    empty.__dict__.clear()
    return empty
