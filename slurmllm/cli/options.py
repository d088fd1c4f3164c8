"""Options shared by several verbs."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, wraps
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from slurmllm.core.config.directives import parse_nodes
from slurmllm.core.display.tables import print_table
from slurmllm.core.errors import UserError
from slurmllm.core.format import ABSENT, Json, Texts, Values
from slurmllm.core.run.rundir import RUN_NAME, is_run, is_sweep, run_folders
from slurmllm.core.run.rundir import runs_root as runs_root_of

if TYPE_CHECKING:
    from slurmllm.core.metrics.curves import Curve
    from slurmllm.launch.submit.prepare import Precompile

F = TypeVar("F", bound=Callable[..., Any])
StepRange = dict[str, int | None]  # `from_step` and `to_step`
Columns = Mapping[str, str | Callable[[Values], str]]  # by heading
_Step = click.IntRange(min=0)
_SIDE = re.compile(r"([A-Z]|#\d+):")  # as `curve_letter` names a source


def complete_run(ctx: click.Context, _: click.Parameter, begin: str) -> list[CompletionItem]:
    """Complete names of runs, or leave paths to the shell if none begins so."""
    names: list[str] = []
    with contextlib.suppress(OSError):
        for entry in run_folders(runs_root_of(ctx.params.get("runs_dir"))):
            # A shell inserts names as they are: those that it would interpret are left out.
            is_named = entry.name.startswith(begin) and RUN_NAME.fullmatch(entry.name)
            if is_named and (is_run(entry) or is_sweep(entry)):
                names.append(entry.name)
    return _completions(sorted(names), begin)


def complete_recipe(_: click.Context, param: click.Parameter, begin: str) -> list[CompletionItem]:
    """Complete names of the shipped recipes, or of the profiles for --cluster."""
    from slurmllm.core.config.profiles import TRAINERS, available
    from slurmllm.core.config.resolve import clusters_dir, recipes_dir

    of_clusters = param.name in ("cluster", "clusters")
    names = available(clusters_dir() if of_clusters else recipes_dir())
    if begin and not of_clusters:
        names += [f"{TRAINERS}/{name}" for name in available(recipes_dir().parent / TRAINERS)]
    return _completions([name for name in names if name.startswith(begin)], begin)


def _completions(names: Sequence[str], begin: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in names] or [CompletionItem(begin, type="file")]


def grouped(
    name: str, kind: Callable[..., Any], fields: Iterable[str], *options: Callable[[Any], Any]
) -> Callable[[F], F]:
    """Add options to a verb, which gets the values of `fields` as one argument, made by `kind`."""

    def add(verb: F) -> F:
        @wraps(verb)
        def call(*arguments: Any, **values: Any) -> Any:
            parts = {field: values.pop(field.replace("-", "_")) for field in fields}
            return verb(*arguments, **values, **{name: kind(**parts)})

        for option in reversed(options):
            call = option(call)
        return cast(F, call)

    return add


def choice(option: str, choices: str, description: str, **more: Any) -> Callable[[F], F]:
    """Add an option whose value is one of `choices`."""
    return click.option(
        *option.split(), type=click.Choice(choices.split()), help=description, **more
    )


def flag(option: str, description: str) -> Callable[[F], F]:
    """Add an option without a value."""
    return click.option(*option.split(), is_flag=True, help=description)


def repeatable(option: str, metavar: str, description: str, **more: Any) -> Callable[[F], F]:
    """Add an option that may be given several times."""
    return click.option(*option.split(), multiple=True, metavar=metavar, help=description, **more)


FILE = click.Path(path_type=Path)
run_argument = partial(click.argument, shell_complete=complete_run)
recipe_argument = partial(click.argument, shell_complete=complete_recipe)
count = partial(click.option, type=click.IntRange(min=1))
set_option = partial(click.option, "--set", "overrides", multiple=True, metavar="PATH=VALUE")
runs_dir = click.option(
    "--runs-dir",
    metavar="DIR",
    callback=lambda _, __, folder: runs_root_of(folder),
    help="Folder of all runs, on the shared file system.  [default: $SLURMLLM_RUNS, else ./runs]",
)
as_json = flag("--json as_json", "Print JSON.")
price = click.option(
    "--price",
    metavar="USD",
    help="Dollars for an hour of one node.  [default: the profile's on-demand price]",
)
set_value = set_option(
    help="Override a value of the recipe or cluster profile, such as optim.lr=1e-4 (which alone "
    "works too); repeatable. env.NAME without a value passes on a variable of this shell."
)
_profile = partial(click.option, "--cluster", metavar="PROFILE", shell_complete=complete_recipe)
cluster = _profile(
    help="Cluster profile, by name or .yaml file.  "
    "[default: $SLURMLLM_CLUSTER, else `init`'s, else the recipe's default_cluster]"
)
site = _profile(
    help="Cluster profile whose setup, interpreter and partition the Slurm jobs use.  "
    "[default: $SLURMLLM_CLUSTER, else `init`'s, else none]"
)


class LogOptions(NamedTuple):
    """How logs of other frameworks are read: VALUE for all sources, `B:VALUE` for one of them."""

    tags: Texts = ()
    patterns: Texts = ()
    wheres: Texts = ()

    def arguments(self, count: int) -> list[Json]:
        """Return the arguments of `read_curve` for each of `count` sources."""
        from slurmllm.analysis.compare.result import curve_letter
        from slurmllm.core.metrics.tags import check_pattern, parse_tags

        letters = [*map(curve_letter, range(count))]
        for value in chain(*self):
            side = _SIDE.match(value)
            if side and side[1] not in letters:
                raise UserError(
                    f"{value!r}: there is no {side[1]}; the sources are A to {letters[-1]}"
                )
        arguments = []
        for letter in letters:
            # The values for this source, without its letter, and those for all
            tags, patterns, wheres = (
                [
                    value.removeprefix(f"{letter}:")
                    for value in values
                    if value.startswith(f"{letter}:") or not _SIDE.match(value)
                ]
                for values in self
            )
            for regex in patterns:
                check_pattern(regex)
            if len(set(patterns)) > 1:
                raise UserError(
                    f"--pattern '{patterns[1]}': there is '{patterns[0]}' already; give one for "
                    f"each log, such as A:{patterns[0]}"
                )
            conditions = {}
            for where in wheres:
                column, equals, entry = where.partition("=")
                if not (column and equals):
                    raise UserError(f"--where {column!r}: give COLUMN=VALUE, such as split=train")
                conditions[column.strip()] = entry.strip()
            pattern = patterns[0] if patterns else None
            arguments.append({"tags": parse_tags(tags), "pattern": pattern, "where": conditions})
        return arguments

    def refuse_unused(self, curves: Sequence[Curve]) -> None:
        """Raise UserError if a value is for our own runs only, which need none."""
        from slurmllm.analysis.compare.result import curve_letter

        of_letter = {curve_letter(number): curve for number, curve in enumerate(curves)}
        for value in chain(*self):
            side = _SIDE.match(value)
            meant = [of_letter[side[1]]] if side else curves
            if all(curve.kind == "run" for curve in meant):
                raise UserError(
                    f"{value!r} does nothing: {meant[0].name} is a run of slurmllm, whose metrics "
                    "have fixed names; leave it out, or give a log of another framework"
                )


log_options = grouped(
    "of_logs",
    LogOptions,
    LogOptions._fields,
    repeatable(
        "--tag tags",
        "METRIC=TAG",
        "Tag, column or key of another framework's log that holds a metric, such as "
        "loss=train/my_loss; A:loss=… for the first source only; repeatable.",
    ),
    repeatable(
        "--pattern patterns",
        "REGEX",
        "Line of a text log, with named groups (?P<step>…), (?P<loss>…), (?P<grad_norm>…); "
        "A:REGEX for the first source only; repeatable.",
    ),
    repeatable(
        "--where wheres",
        "COLUMN=VALUE",
        "Rows of another framework's log to read, such as split=train or rank=0; A:split=train "
        "for the first source only; repeatable.",
    ),
)


def _steps(from_step: int | None, to_step: int | None) -> StepRange:
    if from_step is not None and to_step is not None and from_step > to_step:
        raise UserError(f"--to-step {to_step} is less than --from-step {from_step}; swap them")
    return {"from_step": from_step, "to_step": to_step}


step_range = grouped(
    "steps",
    _steps,
    ("from_step", "to_step"),
    click.option("--from-step", type=_Step, help="First step to read.  [default: the first]"),
    click.option("--to-step", type=_Step, help="Last step to read, inclusive.  [default: last]"),
)


# sbatch's short forms of options that several verbs have
_SHORT = {
    "nodes": "-N",
    "partition": "-p",
    "time": "-t",
    "account": "-A",
    "nodelist": "-w",
    "constraint": "-C",
}
# Options of Slurm jobs; None leaves the choice to the profile or to Slurm.
JOB_OPTIONS = {
    "nodelist": "Nodes to use, such as n3 or n[1-4].",
    "partition": "Slurm partition.",
    "account": "Slurm account.",
    "qos": "Slurm quality of service.",
    "reservation": "Slurm reservation.",
    "exclude": "Nodes to exclude, such as n3 or n[1-4].",
    "dependency": "What the first job waits for, such as afterok:12.",
    "constraint": "Features that the nodes must have, such as a100|h100.",
    "gres": "Generic resources of each node, such as gpu:8.",
    "mem": "Memory of each node, such as 200G.",
    "mail-type": "Events of the jobs on which Slurm sends mail, such as END,FAIL.",
    "time": "Time limit of each job: minutes, H:MM:SS or D-HH:MM:SS.  [default: 60]",
}


node_count = partial(click.option, _SHORT["nodes"], "--nodes")
num_nodes = partial(count, _SHORT["nodes"], "--nodes")
nodes = partial(
    node_count,
    metavar="N[-M]",
    callback=lambda _, __, value: None if value is None else parse_nodes(value),
)


def job_options(names: str, **texts: str) -> Callable[[F], F]:
    """Add options of Slurm jobs, in this order; `texts` are of other meaning for the verb."""

    def add(verb: F) -> F:
        for name in reversed(names.split()):
            forms = [_SHORT[name]] if name in _SHORT else []
            verb = click.option(*forms, f"--{name}", help=texts.get(name, JOB_OPTIONS[name]))(verb)
        return verb

    return add


# Of a verb that allocates nodes, and runs again inside the allocation
ALLOCATION = "nodelist partition account qos reservation exclude time"
ALLOCATION_TIME = "Time limit of the Slurm job: minutes, H:MM:SS or D-HH:MM:SS.  [default: 15]"


def arguments_inside(cluster: str | None, overrides: Texts, as_json: bool) -> list[str]:
    """Return the arguments of a verb that it keeps inside its allocation."""
    arguments = [f"--cluster={cluster}"] if cluster else []
    arguments += [f"--set={override}" for override in overrides]
    return [*arguments, "--json"] if as_json else arguments


# Of submit and resume: fields of the recipe's section slurm, and options of both jobs.
_FIELDS = ("partition", "account", "qos", "time", "reservation", "exclude", "dependency")
_DIRECTIVES = ("constraint", "gres", "mem", "nodelist", "mail-type")


class RunOptions(NamedTuple):
    """The options that submit and resume share.

    Attributes:
        settings: Dotted path → (option, value), as for `resolve`, of the options of Slurm jobs.
    """

    settings: dict[str, tuple[str, Any]]
    dry_run: bool
    local: bool
    in_allocation: bool
    force: bool
    precompile: Precompile
    runs_dir: Path
    as_json: bool


def run_options(time: str) -> Callable[[F], F]:
    """Add the options of submit and resume, which the verb gets as `shared`."""
    description = f"Time limit: minutes, H:MM:SS or D-HH:MM:SS.  [default: {time}]"
    job = (*_FIELDS, *_DIRECTIVES)
    return grouped(
        "shared",
        _run_options,
        ("sbatch", *job, *RunOptions._fields[1:]),
        click.argument(
            "sbatch",
            nargs=-1,
            type=click.UNPROCESSED,
            metavar="[PATH=VALUE...] [-- SBATCH-OPTION...]",
        ),
        job_options(" ".join(job), time=description),
        choice(
            "--precompile",
            "auto always never",
            "auto: skip the precompile stage if nothing is compiled, or if this or an earlier run "
            "has compiled the graphs; always: compile again; never: compile in training.",
            default="auto",
        ),
        runs_dir,
        flag("--dry-run", "Print scripts and environment; submit nothing."),
        flag("--local", "Run both stages on this machine, without Slurm."),
        flag("--in-allocation", "Run the stages here and now, on the nodes of this salloc."),
        flag(
            "--force",
            "Submit even if the planner predicts that the run exceeds device memory; resume even "
            "if a process of another machine may run it.",
        ),
        as_json,
    )


def _run_options(sbatch: Sequence[str], **values: Any) -> RunOptions:
    """Return the options, with settings of those of Slurm jobs, and of those after `--`."""
    from slurmllm.core.config.directives import parse_options

    settings = {f"slurm.{name}": (f"--{name}", values.pop(name)) for name in _FIELDS}
    directives = {name: values.pop(name) for name in _DIRECTIVES}
    try:
        directives |= parse_options(sbatch)
    except ValueError as error:
        raise UserError(str(error)) from error
    for stage in ("train", "precompile"):
        settings |= {f"slurm.directives.{stage}.{n}": (f"--{n}", v) for n, v in directives.items()}
    return RunOptions(settings, **values)


def given() -> list[str]:
    """Return the first names of the options and arguments on the command line."""
    ctx = click.get_current_context()
    return [
        param.opts[0]
        for param in ctx.command.params
        if ctx.get_parameter_source(str(param.name)) is ParameterSource.COMMANDLINE
    ]


def refuse_job_options(job: Mapping[str, object]) -> None:
    """Raise UsageError if an option of Slurm jobs is given, for a verb without --slurm."""
    for name, value in job.items():
        if value is not None:
            raise click.UsageError(f"--{name} applies to Slurm jobs; add --slurm")


def note(message: object) -> None:
    """Print to standard error."""
    click.echo(message, err=True)


def warn(message: object) -> None:
    note(f"warning: {message}")


def echo_json(value: Any, indent: int | None = 2) -> None:
    click.echo(json.dumps(value, indent=indent))


def print_rows(
    as_json: bool,
    name: str,
    rows: Sequence[Values],
    columns: Columns,
    fold: str = "",
) -> None:
    """Print rows as JSON, or as a table of heading → key or function of a row; None is `-`."""
    if as_json:
        echo_json({name: rows})
        return
    table = []
    for row in rows:
        values = (row[key] if isinstance(key, str) else key(row) for key in columns.values())
        table.append([ABSENT if value is None else str(value) for value in values])
    print_table(tuple(columns), table, fold)


def plot(ending: str) -> Callable[[Any], Any]:
    return click.option("--plot", metavar="FILE.png", help=f"Write a plot to FILE.png{ending}")


def plot_or_none(default: str) -> Callable[[F], F]:
    """Add --plot and --no-plot: `plot` is a file, empty for that of `default`, None for none."""
    no_plot = flag("--no-plot", "Do not write a plot.")
    ending = f".  [default: {default}]"
    return grouped("plot", _plot_or_none, ("plot", "no_plot"), plot(ending), no_plot)


def _plot_or_none(plot: str | None, no_plot: bool) -> str | None:
    if plot is not None and no_plot:
        raise UserError("--plot and --no-plot exclude each other; give one of them")
    check_picture(plot)
    return None if no_plot else plot or ""


def check_picture(plot: str | None, option: str = "--plot") -> None:
    """Raise UserError if a picture cannot be written, before any work is done."""
    _check_suffix(option, plot, "pictures are PNG files; use", ".png")


def check_page(option: str, path: str | None) -> None:
    """Raise UserError if the name of an HTML page has another suffix."""
    _check_suffix(option, path, "the page is HTML; name it", ".html", ".htm")


def _check_suffix(option: str, path: str | None, reason: str, *suffixes: str) -> None:
    if path is not None and Path(path).suffix.lower() not in suffixes:
        raise UserError(f"{option} {path}: {reason} {Path(path).stem}{suffixes[0]}")


def check_folder(option: str, path: str | None) -> None:
    """Raise UserError if a file cannot be written by its name; before any work is done."""
    if path is None:
        return
    if not path or Path(path).is_dir():
        fault = "a folder" if path else "no name"
        raise UserError(f"{option} {path or repr(path)}: {fault}; give the name of a file")
    if not (folder := Path(path).parent).is_dir():
        raise UserError(
            f"{option} {path}: the folder {folder} does not exist; `mkdir -p {folder}` first, or "
            "name another file"
        )
