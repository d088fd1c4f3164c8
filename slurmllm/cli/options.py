"""Options shared by several verbs."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from slurmllm.format import printable

if TYPE_CHECKING:
    from slurmllm.metrics.curves import Curve
    from slurmllm.plan.output import PlanTable
    from slurmllm.run.records import Submission
    from slurmllm.slurm.arrays import SlurmOptions

F = TypeVar("F", bound=Callable[..., Any])
_SIDE = re.compile(r"([A-Z]|#\d+):")  # as `curve_letter` names a source
# For terminals and files without Unicode (LC_ALL=C)
_ASCII = str.maketrans({
    "…": "...", "→": "->", "←": "<-", "–": "-", "─": "-", "×": "x", "·": ".", "≤": "<=", "≥": ">=",
    "├": "|", "└": "`", "│": "|", "“": '"', "”": '"', "’": "'",
})  # fmt: skip


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
    """From here on a closed or full standard output is no failure of the verb."""
    if isinstance(sys.stdout, StandardStream):
        sys.stdout.tolerant = True


def _after_from_step(ctx: click.Context, _: click.Parameter, last: int | None) -> int | None:
    first = ctx.params.get("from_step")
    if first is not None and last is not None and first > last:
        from slurmllm.errors import UserError

        raise UserError(f"--to-step {last} is less than --from-step {first}; swap them")
    return last


def complete_run(ctx: click.Context, _: click.Parameter, begin: str) -> list[CompletionItem]:
    """Names of runs for the shell, or its own completion of paths if none begins so."""
    from slurmllm.run.rundir import RUN_NAME, is_run, is_sweep, run_folders, runs_root

    found: list[str] = []
    with contextlib.suppress(OSError):
        entries = run_folders(runs_root(ctx.params.get("runs_dir")))
        # A shell inserts names as they are: those that it would interpret are left out.
        named = [e for e in entries if e.name.startswith(begin) and RUN_NAME.fullmatch(e.name)]
        found = sorted(one.name for one in named if is_run(one) or is_sweep(one))
    return _completions(found, begin)


def complete_recipe(_: click.Context, param: click.Parameter, begin: str) -> list[CompletionItem]:
    """Names of the shipped recipes, or of the profiles for --cluster."""
    from slurmllm.config.profiles import available
    from slurmllm.config.resolve import clusters_dir, recipes_dir

    names = available(clusters_dir() if param.name in ("cluster", "clusters") else recipes_dir())
    return _completions([name for name in names if name.startswith(begin)], begin)


def _completions(names: Sequence[str], begin: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in names] or [CompletionItem(begin, type="file")]


def set_option(text: str) -> Callable[[Any], Any]:
    return click.option("--set", "overrides", multiple=True, metavar="PATH=VALUE", help=text)


def _runs_root(_: click.Context, __: click.Parameter, folder: str | None) -> Path:
    from slurmllm.run.rundir import runs_root

    return runs_root(folder)


runs_dir = click.option(
    "--runs-dir", metavar="DIR", callback=_runs_root,
    help="Folder of all runs, on the shared file system.  [default: $SLURMLLM_RUNS, else ./runs]",
)  # fmt: skip
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
price = click.option(
    "--price", metavar="NAME|USD",
    help="on_demand, capacity_block, 1y or 3y, with a region before it if needed "
    "(us-east-1/1y); or, with one profile, dollars for an hour of one node.  [default: on_demand]",
)  # fmt: skip
set_value = set_option(
    "Override a value of the recipe or cluster profile, such as optim.lr=1e-4; repeatable. "
    "env.NAME without a value passes on a variable of this shell."
)
precompile = click.option(
    "--precompile", type=click.Choice(["auto", "always"]), default="auto", show_default=True,
    help="auto: skip the precompile stage if this or an earlier run has compiled the graphs; "
    "always: compile again.",
)  # fmt: skip
cluster = click.option(
    "--cluster", metavar="PROFILE", shell_complete=complete_recipe,
    help="Cluster profile, by name or .yaml file.  "
    "[default: $SLURMLLM_CLUSTER, else the recipe's default_cluster]",
)  # fmt: skip
site = click.option(
    "--cluster", metavar="PROFILE", shell_complete=complete_recipe,
    help="Cluster profile whose setup, interpreter and partition the Slurm jobs use.  "
    "[default: $SLURMLLM_CLUSTER, else none]",
)  # fmt: skip
tags = click.option(
    "--tag", "tags", multiple=True, metavar="METRIC=TAG",
    help="Tag, column or key of another framework's log that holds a metric, such as "
    "loss=train/my_loss; A:loss=… for the first source only; repeatable.",
)  # fmt: skip
patterns = click.option(
    "--pattern", "patterns", multiple=True, metavar="REGEX",
    help="Line of a text log, with named groups (?P<step>…), (?P<loss>…), (?P<grad_norm>…); "
    "A:REGEX for the first source only; repeatable.",
)  # fmt: skip
from_step = click.option(
    "--from-step", type=click.IntRange(min=0),
    is_eager=True,  # parsed before --to-step, whose callback reads it
    help="First step to read.  [default: the first]",
)  # fmt: skip
to_step = click.option(
    "--to-step", type=click.IntRange(min=0), callback=_after_from_step,
    help="Last step to read, inclusive.  [default: the last]",
)  # fmt: skip
in_allocation = click.option(
    "--in-allocation", is_flag=True,
    help="Run the stages here and now, on the nodes of the allocation (salloc) of this shell.",
)  # fmt: skip
force = click.option(
    "--force", is_flag=True,
    help="Submit even if the planner predicts that the run exceeds device memory.",
)  # fmt: skip


# Options of Slurm jobs; None leaves the choice to the profile or to Slurm.
_JOB = {
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
    """`4`, or `2-4` → (2, 4): the fewest nodes, None without a range, and the most."""
    if value is None:
        return None
    least, dash, most = value.partition("-")
    try:
        found = (int(least), int(most)) if least and dash else (None, int(value))
    except ValueError:
        found = (0, 0)
    if not 1 <= (found[1] if found[0] is None else found[0]) <= found[1]:
        text = f"{value!r} is neither a number of nodes, 1 or more, nor a range, such as 2-4"
        raise click.BadParameter(text, ctx, param)
    return found


def nodes(text: str, default: str | None = None) -> Callable[[F], F]:
    """--nodes, a number or a range."""
    return click.option(
        "--nodes", metavar="N[-M]", callback=_node_counts, help=text, default=default,
        show_default=default is not None,
    )  # fmt: skip


def job_options(names: str, prefix: str = "", **texts: str) -> Callable[[F], F]:
    """Some options of Slurm jobs, in this order; `texts` are of other meaning for the verb."""

    def add(verb: F) -> F:
        for name in reversed(names.split()):
            verb = click.option(f"--{name}", help=prefix + texts.get(name, _JOB[name]))(verb)
        return verb

    return add


def slurm_options(
    cluster: str | None,
    given: Mapping[str, Any],
    directives: Mapping[str, str | bool] | None = None,
) -> SlurmOptions:
    """Options of an array, with what the profile `cluster`, or $SLURMLLM_CLUSTER, has for jobs.

    Args:
        cluster: The profile's name or file.
        given: Fields of the result, by name; None leaves one out.
        directives: Further options of sbatch.

    Raises:
        ConfigError: the profile, or a line of its cluster.setup, is faulty.
    """
    from slurmllm.slurm.arrays import SlurmOptions

    found = {name: value for name, value in given.items() if value is not None}
    if cluster or os.environ.get("SLURMLLM_CLUSTER"):
        from slurmllm.config.container import container_arguments
        from slurmllm.config.directives import parse_options
        from slurmllm.config.resolve import resolve
        from slurmllm.errors import ConfigError
        from slurmllm.slurm.setup import setup_faults

        profile = resolve("tiny_neox", cluster).cluster  # the recipe is not used
        if faults := setup_faults(profile.setup):
            raise ConfigError(f"cluster profile {profile.name}", faults)
        own = {"partition": profile.partition, "setup": profile.setup, "python": profile.python}
        found = {**own, **found}
        if (container := profile.container) is not None:
            shown = (Path.cwd(), profile.node_local)
            found |= {
                "python": container.python,
                "container": lambda folders: container_arguments(
                    container, profile.device, [*folders, *shown]
                ),
                "by_srun": container.srun_runs_it,
            }
        directives = {**parse_options(profile.directives), **(directives or {})}
    return SlurmOptions(**found, directives=directives or {})


# Of submit and resume: fields of the recipe's section slurm, and options of both jobs.
FIELDS = "partition account qos time reservation exclude dependency"
DIRECTIVES = "constraint gres mem nodelist mail-type"
sbatch_options = click.argument(
    "sbatch", nargs=-1, type=click.UNPROCESSED, metavar="[-- SBATCH-OPTION...]"
)


def slurm_settings(
    given: Mapping[str, str | None], more: Sequence[str]
) -> dict[str, tuple[str, Any]]:
    """Dotted path → (option, value) for `resolve`, of the options above and of those after `--`."""
    from slurmllm.config.directives import parse_options
    from slurmllm.errors import UserError

    found: dict[str, tuple[str, Any]] = {
        f"slurm.{name}": (f"--{name}", given[name]) for name in FIELDS.split()
    }
    options: dict[str, Any] = {n: given[n.replace("-", "_")] for n in DIRECTIVES.split()}
    try:
        options |= parse_options(more)
    except ValueError as error:
        raise UserError(str(error)) from error
    for stage in ("train", "precompile"):
        found |= {f"slurm.directives.{stage}.{n}": (f"--{n}", v) for n, v in options.items()}
    return found


def as_before(last: Submission | None, nodes: int | None, local: bool) -> tuple[int, bool]:
    """Nodes, and whether they are launchers on this machine; by default as the last submission."""
    wanted = nodes if nodes is not None else last.nodes if last else 1
    return wanted, local or (last is not None and last.local and last.allocation is None)


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


def write_tables(
    outputs: Mapping[str, str | None], rows: Sequence[Mapping[str, Any]],
    tables: Sequence[PlanTable], notes: Sequence[str] = (),
) -> None:  # fmt: skip
    """Write what --csv and --markdown ask for; `-` is standard output."""
    from slurmllm.config.yaml_source import flatten
    from slurmllm.display.tables import csv_text, markdown_table
    from slurmllm.run.rundir import write_bytes

    for option, path in outputs.items():
        if path is None:
            continue
        if option == "--csv":
            text = csv_text([
                {key: "; ".join(map(str, value)) if isinstance(value, list | tuple) else value
                 for key, value in flatten(row).items()}
                for row in rows
            ])  # fmt: skip
        else:
            text = "\n".join(markdown_table(*one) for one in tables)
            text += "".join(f"\n{note}\n" for note in notes)
        if path == "-":
            click.echo(text, nl=False)
        else:
            fix = f"name another file with {option}"
            write_bytes(Path(path), text.encode(), f"cannot write {path}", fix)


def source_options(
    tags: Sequence[str], patterns: Sequence[str], count: int
) -> tuple[list[dict[str, str]], list[str | None]]:
    """Returns tags and pattern of each of `count` sources: `B:VALUE` is for one, VALUE for all."""
    from slurmllm.compare.comparison import curve_letter
    from slurmllm.errors import UserError
    from slurmllm.metrics.tags import parse_tags
    from slurmllm.metrics.text_logs import check_pattern

    letters = [curve_letter(place) for place in range(count)]
    for value in (*tags, *patterns):
        side = _SIDE.match(value)
        if side and side[1] not in letters:
            raise UserError(f"{value!r}: there is no {side[1]}; the sources are A to {letters[-1]}")
    mappings: list[dict[str, str]] = []
    expressions: list[str | None] = []
    for letter in letters:
        own_tags, own_patterns = (
            [
                value.removeprefix(f"{letter}:")
                for value in values
                if value.startswith(f"{letter}:") or not _SIDE.match(value)
            ]
            for values in (tags, patterns)
        )
        mappings.append(parse_tags(own_tags))
        for pattern in own_patterns:
            check_pattern(pattern)
        if len(set(own_patterns)) > 1:
            raise UserError(
                f"--pattern '{own_patterns[1]}': there is '{own_patterns[0]}' already; give one "
                "for each log, such as A:REGEX"
            )
        expressions.append(own_patterns[0] if own_patterns else None)
    return mappings, expressions


def refuse_unused(curves: Sequence[Curve], values: Sequence[str]) -> None:
    """Raises UserError if a tag or pattern is for our own runs only, which need none."""
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
