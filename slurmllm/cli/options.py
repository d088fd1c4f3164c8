"""Options shared by several verbs."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import click
from click.shell_completion import CompletionItem

from slurmllm.format import printable

if TYPE_CHECKING:
    from slurmllm.metrics.curves import Curve
    from slurmllm.plan.output import PlanTable
    from slurmllm.run.records import Submission
    from slurmllm.slurm.arrays import SlurmOptions
    from slurmllm.submit.prepare import Precompile

F = TypeVar("F", bound=Callable[..., Any])
_SIDE = re.compile(r"([A-Z]|#\d+):")  # as `curve_letter` names a source
# For terminals and files without Unicode (LC_ALL=C)
_ASCII = str.maketrans(
    {"…": "...", "→": "->", "←": "<-", "≤": "<=", "≥": ">=", "×": "x", "·": "."}
    | dict(zip("–─├└│“”’", '--|`|""\'', strict=True))
)


class StandardStream(io.TextIOWrapper):
    """Standard output or error: whatever a verb prints of others' texts, it steers no terminal.

    Attributes:
        tolerant: Whether a closed pipe or a full disk is ignored: jobs that were submitted run on,
            so that the verb has not failed.
        ascii: Whether only ASCII is printed. Its encoding is UTF-8 all the same, or click would
            write past it.
    """

    tolerant = False
    ascii = False

    def write(self, text: str) -> int:
        text = printable(text, styles=self.isatty() and "NO_COLOR" not in os.environ)
        if self.ascii:
            text = text.translate(_ASCII).encode("ascii", "backslashreplace").decode()
        with contextlib.suppress(*([OSError] if self.tolerant else [])):
            return super().write(text)
        return 0

    def flush(self) -> None:
        with contextlib.suppress(*([OSError] if self.tolerant else [])):
            super().flush()


def open_outputs() -> None:
    """Replace the standard streams by `StandardStream`; a closed one by the null device."""
    for number, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        try:
            os.fstat(number)
        except OSError:  # otherwise the next file that is opened would be the standard output
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
        stream = getattr(sys, name)
        if number:
            binary = os.fdopen(number, "wb", closefd=False) if stream is None else stream.buffer
            output = StandardStream(binary, "utf-8", "backslashreplace", line_buffering=True)
            output.ascii = stream is not None and not stream.encoding.lower().startswith("utf")
            setattr(sys, name, output)


def ignore_output_errors() -> None:
    """Ignore a closed or full standard output from here on."""
    if isinstance(sys.stdout, StandardStream):
        sys.stdout.tolerant = True


def _after_from_step(ctx: click.Context, _: click.Parameter, last: int | None) -> int | None:
    first = ctx.params.get("from_step")
    if first is not None and last is not None and first > last:
        from slurmllm.errors import UserError

        raise UserError(f"--to-step {last} is less than --from-step {first}; swap them")
    return last


def complete_run(ctx: click.Context, _: click.Parameter, begin: str) -> list[CompletionItem]:
    """Complete names of runs, or leave paths to the shell if none begins so."""
    from slurmllm.run.rundir import RUN_NAME, is_run, is_sweep, run_folders, runs_root

    names: list[str] = []
    with contextlib.suppress(OSError):
        entries = run_folders(runs_root(ctx.params.get("runs_dir")))
        # A shell inserts names as they are: those that it would interpret are left out.
        runs = [e for e in entries if e.name.startswith(begin) and RUN_NAME.fullmatch(e.name)]
        names = sorted(run.name for run in runs if is_run(run) or is_sweep(run))
    return _completions(names, begin)


def complete_recipe(_: click.Context, param: click.Parameter, begin: str) -> list[CompletionItem]:
    """Complete names of the shipped recipes, or of the profiles for --cluster."""
    from slurmllm.config.profiles import TRAINERS, available
    from slurmllm.config.resolve import clusters_dir, recipes_dir

    of_clusters = param.name in ("cluster", "clusters")
    names = available(clusters_dir() if of_clusters else recipes_dir())
    if begin and not of_clusters:
        names += [f"{TRAINERS}/{name}" for name in available(recipes_dir().parent / TRAINERS)]
    return _completions([name for name in names if name.startswith(begin)], begin)


def _completions(names: Sequence[str], begin: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in names] or [CompletionItem(begin, type="file")]


def _runs_root(_: click.Context, __: click.Parameter, folder: str | None) -> Path:
    from slurmllm.run.rundir import runs_root

    return runs_root(folder)


set_option = functools.partial(
    click.option, "--set", "overrides", multiple=True, metavar="PATH=VALUE"
)
runs_dir = click.option(
    "--runs-dir",
    metavar="DIR",
    callback=_runs_root,
    help="Folder of all runs, on the shared file system.  [default: $SLURMLLM_RUNS, else ./runs]",
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
price = click.option(
    "--price",
    metavar="NAME|USD",
    help="on_demand, capacity_block, 1y or 3y, with a region before it if needed "
    "(us-east-1/1y); or, with one profile, dollars for an hour of one node.  [default: on_demand]",
)
set_value = set_option(
    help="Override a value of the recipe or cluster profile, such as optim.lr=1e-4, also without "
    "--set; repeatable. env.NAME without a value passes on a variable of this shell."
)
_profile = functools.partial(
    click.option, "--cluster", metavar="PROFILE", shell_complete=complete_recipe
)
cluster = _profile(
    help="Cluster profile, by name or .yaml file.  "
    "[default: $SLURMLLM_CLUSTER, else `init`'s, else the recipe's default_cluster]"
)
site = _profile(
    help="Cluster profile whose setup, interpreter and partition the Slurm jobs use.  "
    "[default: $SLURMLLM_CLUSTER, else `init`'s, else none]"
)
tags = click.option(
    "--tag",
    "tags",
    multiple=True,
    metavar="METRIC=TAG",
    help="Tag, column or key of another framework's log that holds a metric, such as "
    "loss=train/my_loss; A:loss=… for the first source only; repeatable.",
)
patterns = click.option(
    "--pattern",
    "patterns",
    multiple=True,
    metavar="REGEX",
    help="Line of a text log, with named groups (?P<step>…), (?P<loss>…), (?P<grad_norm>…); "
    "A:REGEX for the first source only; repeatable.",
)
wheres = click.option(
    "--where",
    "wheres",
    multiple=True,
    metavar="COLUMN=VALUE",
    help="Rows of another framework's log to read, such as split=train or rank=0; A:split=train "
    "for the first source only; repeatable.",
)
decimals = click.option(
    "--decimal",
    "decimals",
    multiple=True,
    metavar="MARK",
    help="Decimal mark of a log's numbers, comma or point; A:comma for the first source only.  "
    "[default: as the numbers of a column show]",
)
from_step = click.option(
    "--from-step",
    type=click.IntRange(min=0),
    is_eager=True,  # parsed before --to-step, whose callback reads it
    help="First step to read.  [default: the first]",
)
to_step = click.option(
    "--to-step",
    type=click.IntRange(min=0),
    callback=_after_from_step,
    help="Last step to read, inclusive.  [default: the last]",
)


# sbatch's short forms of options that several verbs have
_SHORT = {"nodes": "-N", "partition": "-p", "time": "-t", "account": "-A", "nodelist": "-w"}
_SHORT |= {"constraint": "-C"}
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


def _node_counts(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> tuple[int | None, int] | None:
    """Parse `4`, or `2-4` → (2, 4): the fewest nodes, None without a range, and the most."""
    match = re.fullmatch(r"(?:(\d{1,9})-)?(\d{1,9})", (value or "").strip())
    if value is None:
        return None
    fewest, most = (int(count) if count else None for count in match.groups()) if match else (0, 0)
    if most is None or not 1 <= (most if fewest is None else fewest) <= most:
        text = f"{value!r} is neither a number of nodes, 1 or more, nor a range, such as 2-4"
        raise click.BadParameter(text, ctx, param)
    return fewest, most


node_count = functools.partial(click.option, _SHORT["nodes"], "--nodes")
nodes = functools.partial(node_count, metavar="N[-M]", callback=_node_counts)


def job_options(names: str, prefix: str = "", **texts: str) -> Callable[[F], F]:
    """Add options of Slurm jobs, in this order; `texts` are of other meaning for the verb."""

    def add(verb: F) -> F:
        for name in reversed(names.split()):
            forms = [_SHORT[name]] if name in _SHORT else []
            verb = click.option(
                *forms, f"--{name}", help=prefix + texts.get(name, JOB_OPTIONS[name])
            )(verb)
        return verb

    return add


def slurm_options(
    cluster: str | None,
    fields: Mapping[str, Any],
    directives: Mapping[str, str | bool] | None = None,
) -> SlurmOptions:
    """Return options of an array, with what the profile `cluster`, or the user's default one, has.

    Args:
        cluster: The profile's name or file.
        fields: Of the result, by name; None leaves one out.
        directives: Further options of sbatch.

    Raises:
        ConfigError: the profile, or a line of its cluster.setup, is faulty.
    """
    from slurmllm.config.directives import USER_DEFAULTS, parse_options, user_defaults
    from slurmllm.config.user_file import choose_cluster
    from slurmllm.slurm.arrays import SlurmOptions

    places = dict[str, Any](user_defaults())
    values = {name: value for name, value in fields.items() if value is not None}
    if choose_cluster(cluster)[0]:
        from slurmllm.config.container import container_arguments
        from slurmllm.config.resolve import resolve
        from slurmllm.errors import ConfigError
        from slurmllm.slurm.setup import setup_faults

        config = resolve("tiny_neox", cluster)  # of the recipe, only what is the shell's is used
        profile, slurm = config.cluster, config.recipe.slurm
        places = slurm.model_dump(include=set(USER_DEFAULTS), exclude_none=True)
        places = {"partition": profile.partition, **places}
        if faults := setup_faults(profile.setup):
            raise ConfigError(f"cluster profile {profile.name}", faults)
        values = {"setup": profile.setup, "python": profile.python, **values}
        if (container := profile.container) is not None:
            shown = (Path.cwd(), profile.node_local)
            values |= {"python": container.python, "by_srun": container.srun_runs_it}
            values["container"] = lambda folders: container_arguments(
                container, profile.device, [*folders, *shown]
            )
        directives = {**parse_options(profile.directives), **(directives or {})}
    if "reservation" in places:
        directives = {"reservation": places.pop("reservation"), **(directives or {})}
    return SlurmOptions(**{**places, **values}, directives=directives or {})


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
    precompile = click.option(
        "--precompile",
        type=click.Choice(["auto", "always", "never"]),
        default="auto",
        show_default=True,
        help="auto: skip the precompile stage if nothing is compiled, or if this or an earlier run "
        "has compiled the graphs; always: compile again; never: compile in training.",
    )
    text = f"Time limit: minutes, H:MM:SS or D-HH:MM:SS.  [default: {time}]"
    options = (
        click.argument(
            "sbatch",
            nargs=-1,
            type=click.UNPROCESSED,
            metavar="[PATH=VALUE...] [-- SBATCH-OPTION...]",
        ),
        job_options(" ".join((*_FIELDS, *_DIRECTIVES)), time=text),
        precompile,
        runs_dir,
        _flag("--dry-run", "Print scripts and environment; submit nothing."),
        _flag("--local", "Run both stages on this machine, without Slurm."),
        _flag("--in-allocation", "Run the stages here and now, on the nodes of this salloc."),
        _flag(
            "--force",
            "Submit even if the planner predicts that the run exceeds device memory; resume even "
            "if a process of another machine may run it.",
        ),
        as_json,
    )

    def add(verb: F) -> F:
        @functools.wraps(verb)
        def call(*arguments: Any, sbatch: Sequence[str], **values: Any) -> Any:
            slurm = {name: values.pop(name.replace("-", "_")) for name in (*_FIELDS, *_DIRECTIVES)}
            shared = {name: values.pop(name) for name in RunOptions._fields[1:]}
            settings = _slurm_settings(slurm, sbatch)
            return verb(*arguments, **values, shared=RunOptions(settings, **shared))

        for option in reversed(options):
            call = option(call)
        return cast(F, call)

    return add


def _flag(name: str, text: str) -> Callable[[F], F]:
    return click.option(name, is_flag=True, help=text)


def _slurm_settings(
    options: Mapping[str, str | None], more: Sequence[str]
) -> dict[str, tuple[str, Any]]:
    """Return the settings of the options above, by name, and of those after `--`."""
    from slurmllm.config.directives import parse_options
    from slurmllm.errors import UserError

    settings: dict[str, tuple[str, Any]] = {
        f"slurm.{name}": (f"--{name}", options[name]) for name in _FIELDS
    }
    directives: dict[str, Any] = {name: options[name] for name in _DIRECTIVES}
    try:
        directives |= parse_options(more)
    except ValueError as error:
        raise UserError(str(error)) from error
    for stage in ("train", "precompile"):
        settings |= {f"slurm.directives.{stage}.{n}": (f"--{n}", v) for n, v in directives.items()}
    return settings


def nodes_and_mode(last: Submission | None, nodes: int | None, local: bool) -> tuple[int, bool]:
    """Return nodes, and whether they are launchers on this machine, by default as before."""
    count = nodes if nodes is not None else last.nodes if last else 1
    return count, local or (last is not None and last.local and last.allocation is None)


def echo_json(value: Any, indent: int | None = 2) -> None:
    click.echo(json.dumps(value, indent=indent))


def plot(text: str) -> Callable[[Any], Any]:
    return click.option("--plot", metavar="FILE.png", help=f"Write a plot to FILE.png{text}")


no_plot = click.option("--no-plot", is_flag=True, help="Do not write a plot.")


def check_picture(plot: str | None, no_plot: bool = False, option: str = "--plot") -> None:
    """Raise UserError if a picture cannot be written, before any work is done."""
    from slurmllm.errors import UserError

    if plot is not None and no_plot:
        raise UserError("--plot and --no-plot exclude each other; give one of them")
    if plot is not None and Path(plot).suffix.lower() != ".png":
        raise UserError(f"{option} {plot}: pictures are PNG files; use {Path(plot).stem}.png")


def check_folder(option: str, path: str | None) -> None:
    """Raise UserError if a file cannot be written by its name; before any work is done."""
    from slurmllm.errors import UserError

    if path is None:
        return
    if not path or Path(path).is_dir():
        what = "a folder" if path else "no name"
        raise UserError(f"{option} {path or repr(path)}: {what}; give the name of a file")
    folder = Path(path).parent
    if not folder.is_dir():
        raise UserError(
            f"{option} {path}: the folder {folder} does not exist; `mkdir -p {folder}` first, or "
            "name another file"
        )


def _csv_cell(value: Any) -> Any:
    return "; ".join(map(str, value)) if isinstance(value, list | tuple) else value


def write_tables(
    outputs: Mapping[str, str | None],
    rows: Sequence[Mapping[str, Any]],
    tables: Sequence[PlanTable],
    notes: Sequence[str] = (),
) -> None:
    """Write what --csv and --markdown ask for; `-` is standard output."""
    from slurmllm.config.yaml_source import flatten
    from slurmllm.display.tables import csv_text, markdown_table
    from slurmllm.run.rundir import write_bytes

    for option, path in outputs.items():
        if path is None:
            continue
        if option == "--csv":
            flat = [flatten(row) for row in rows]
            text = csv_text([{key: _csv_cell(cell) for key, cell in row.items()} for row in flat])
        else:
            text = "\n".join(markdown_table(*table) for table in tables)
            text += "".join(f"\n{note}\n" for note in notes)
        if path == "-":
            click.echo(text, nl=False)
        else:
            fix = f"name another file with {option}"
            write_bytes(Path(path), text.encode(), f"cannot write {path}", fix)


def source_options(
    tags: Sequence[str],
    patterns: Sequence[str],
    wheres: Sequence[str],
    decimals: Sequence[str],
    count: int,
) -> list[dict[str, Any]]:
    """Return the arguments of `read_curve` for each of `count` sources.

    `B:VALUE` is for one source, VALUE for all.
    """
    from slurmllm.compare.comparison import curve_letter
    from slurmllm.errors import UserError
    from slurmllm.metrics.tags import check_pattern, parse_tags

    letters = [curve_letter(place) for place in range(count)]
    for value in (*tags, *patterns, *wheres, *decimals):
        side = _SIDE.match(value)
        if side and side[1] not in letters:
            raise UserError(f"{value!r}: there is no {side[1]}; the sources are A to {letters[-1]}")
    arguments: list[dict[str, Any]] = []
    for letter in letters:
        regexes = _values_of(letter, patterns)
        for regex in regexes:
            check_pattern(regex)
        conditions = [value.partition("=") for value in _values_of(letter, wheres)]
        for column, _, text in conditions:
            if not (column and text):
                raise UserError(f"--where {column!r}: give COLUMN=VALUE, such as split=train")
        marks = _values_of(letter, decimals)
        for mark in marks:
            if mark not in ("comma", "point"):
                raise UserError(f"--decimal {mark}: give comma or point")
        for option, values in (("--pattern", regexes), ("--decimal", marks)):
            if len(set(values)) > 1:
                raise UserError(
                    f"{option} '{values[1]}': there is '{values[0]}' already; give one for each "
                    f"log, such as A:{values[0]}"
                )
        arguments.append(
            {
                "tags": parse_tags(_values_of(letter, tags)),
                "pattern": next(iter(regexes), None),
                "where": {column.strip(): text.strip() for column, _, text in conditions},
                "decimal": next(iter(marks), None),
            }
        )
    return arguments


def _values_of(letter: str, values: Sequence[str]) -> list[str]:
    """Return the values for one source, without its letter, and those for all."""
    prefix = f"{letter}:"
    return [v.removeprefix(prefix) for v in values if v.startswith(prefix) or not _SIDE.match(v)]


def refuse_unused(curves: Sequence[Curve], values: Sequence[str]) -> None:
    """Raise UserError if a tag or pattern is for our own runs only, which need none."""
    from slurmllm.compare.comparison import curve_letter
    from slurmllm.errors import UserError

    of_letter = {curve_letter(place): curve for place, curve in enumerate(curves)}
    for value in values:
        side = _SIDE.match(value)
        meant = [of_letter[side[1]]] if side else curves
        if all(curve.kind == "run" for curve in meant):
            raise UserError(
                f"{value!r} does nothing: {meant[0].name} is a run of slurmllm, whose metrics have "
                "fixed names; leave it out, or give a log of another framework"
            )
