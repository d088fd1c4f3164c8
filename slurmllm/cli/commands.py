"""Classes of commands: headings in the help, PATH=VALUE as --set; and the standard streams."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import sys
from collections.abc import Sequence
from itertools import islice, takewhile
from typing import Any

import click

from slurmllm.cli.options import JOB_OPTIONS
from slurmllm.core import removed
from slurmllm.core.format import printable

_SETTING = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*=.*", re.DOTALL)  # PATH=VALUE
# Options under these headings
_OF_SLURM = {*JOB_OPTIONS, "in-allocation", "slurm", "cluster", "cpus", "gpus"}
_OF_SWEEPS = {"sweep", "sweep-file", "max-running", "yes"}


_ASCII = str.maketrans(
    {"…": "...", "→": "->", "←": "<-", "≤": "<=", "≥": ">=", "×": "x", "·": "."}
    | dict(zip("–─├└│“”’", '--|`|""\'', strict=True))
)


# The verb's name, the verb and its arguments
Resolved = tuple[str | None, click.Command | None, list[str]]


class GroupedCommand(click.Command):
    """A command with many options, which its help shows under headings.

    Attributes:
        common: The options that come first, without dashes.
    """

    def __init__(self, *arguments: Any, common: str, **fields: Any) -> None:
        super().__init__(*arguments, **fields)
        self.common = common.split()

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["arguments"] = tuple(args)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {
            kind: [] for kind in ("Common", "Slurm", "Sweep", "Advanced")
        }
        kinds = dict.fromkeys(_OF_SWEEPS, "Sweep") | dict.fromkeys(_OF_SLURM, "Slurm")
        kinds |= dict.fromkeys(self.common, "Common")
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                name = max(param.opts, key=len).removeprefix("--")
                sections[kinds.get(name, "Advanced")].append(record)
        for kind, records in sections.items():
            if records:
                with formatter.section(f"{kind} options"):
                    formatter.write_dl(records)


grouped = functools.partial(click.command, cls=GroupedCommand)


class Verbs(click.Group):
    """A group whose verbs take PATH=VALUE among their arguments as --set PATH=VALUE."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            verb = error.ctx.command_path.split(maxsplit=1)[-1] if error.ctx else ""
            message = removed.option_message(verb, error.option_name)
            if message is None:
                raise
            raise click.UsageError(message, error.ctx) from error

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Resolved:
        path = f"{ctx.command_path} {args[0]}".split(maxsplit=1)[1]
        message = removed.verb_message(path)
        if message is not None and not ctx.resilient_parsing:
            ctx.fail(message)
        name, verb, arguments = super().resolve_command(ctx, args)
        fields = [param.name for param in verb.params] if verb else []
        if verb is None or "overrides" not in fields:
            return name, verb, arguments
        end = arguments.index("--") if "--" in arguments else len(arguments)
        before, positional = _with_set_options(verb, arguments[:end])
        after = arguments[end + 1 :]
        if after and "command" in fields:
            return name, verb, with_command(before, positional, after)
        return name, verb, [*before, *arguments[end:]]


def _with_set_options(verb: click.Command, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments with --set before each PATH=VALUE, and the positional ones."""
    takes_value = {
        name
        for option in verb.params
        if isinstance(option, click.Option) and not option.is_flag
        for name in option.opts
    }
    result = list[str]()
    positional = list[str]()
    remaining = iter(arguments)
    for argument in remaining:
        if _SETTING.fullmatch(argument):
            result.append("--set")
        elif not argument.startswith("-"):
            positional.append(argument)
        result.append(argument)
        if argument in takes_value:
            result += islice(remaining, 1)  # which may look like a setting
    return result, positional


def with_command(
    before: Sequence[str], positional: Sequence[str], after: Sequence[str]
) -> list[str]:
    """Return arguments in which the command line after `--` is the option --command.

    After a RECIPE, if the first argument after `--` begins with a dash, all are options of sbatch.
    Without a RECIPE, or after an adapter (trainers/NAME), only those before the first argument
    without a dash are, each as `--name=value`; the command begins there.
    """
    from slurmllm.core.config.command import join_arguments, name_of_command
    from slurmllm.core.config.profiles import TRAINERS

    options = list(takewhile(lambda argument: argument.startswith("-"), after))
    command = after[len(options) :]
    is_recipe = bool(positional) and not positional[0].startswith(f"{TRAINERS}/")
    if not command or (options and is_recipe):
        return [*before, "--", *after]
    arguments = [*before, f"--command={join_arguments(command)}"]
    if not positional:  # the name is that of the program
        arguments = [f"{TRAINERS}/plain", f'--set=name="{name_of_command(command)}"', *arguments]
    return [*arguments, "--", *options] if options else arguments


class StandardStream(io.TextIOWrapper):
    """Standard output or error: whatever a verb prints of others' texts, it steers no terminal.

    Attributes:
        tolerant: Whether a closed pipe or a full disk is ignored: jobs that were submitted run on,
            so that the verb has not failed. The loss of standard error changes no exit code.
        ascii: Whether only ASCII is printed. Its encoding is UTF-8 all the same, or click would
            write past it.
    """

    tolerant = False
    ascii = False

    def write(self, output: str) -> int:
        output = printable(output, styles=self.isatty() and "NO_COLOR" not in os.environ)
        if self.ascii:
            output = output.translate(_ASCII).encode("ascii", "backslashreplace").decode()
        with self._ignored_errors():
            return super().write(output)
        return 0

    def flush(self) -> None:
        with self._ignored_errors():
            super().flush()

    def _ignored_errors(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.suppress(OSError) if self.tolerant else contextlib.nullcontext()


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
            output.tolerant = name == "stderr"
            setattr(sys, name, output)


def ignore_output_errors() -> None:
    """Ignore a closed or full standard output from here on."""
    if isinstance(sys.stdout, StandardStream):
        sys.stdout.tolerant = True
