"""Commands whose help has headings, and groups of commands that take PATH=VALUE as --set."""

from __future__ import annotations

import re
import shlex
from typing import Any

import click

from slurmllm.cli.options import JOB_OPTIONS

_SETTING = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*=.*", re.DOTALL)  # PATH=VALUE
# Options under these headings
_OF_SLURM = {*JOB_OPTIONS, "in-allocation", "slurm", "cluster", "cpus", "gpus"}
_OF_SWEEPS = {"sweep", "sweep-file", "max-running", "yes"}


class GroupedCommand(click.Command):
    """A command with many options, which its help shows under headings.

    Attributes:
        common: The options that come first, without dashes.
    """

    def __init__(self, *arguments: Any, common: str, **fields: Any) -> None:
        super().__init__(*arguments, **fields)
        self.common = common.split()

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        headings = ("Common options", "Slurm options", "Sweep options", "Advanced options")
        sections: dict[str, list[tuple[str, str]]] = {heading: [] for heading in headings}
        for param in self.get_params(ctx):
            record = None if isinstance(param, click.Argument) else param.get_help_record(ctx)
            if record is not None:
                name = max(param.opts, key=len).removeprefix("--")
                kinds = (name in self.common, name in _OF_SLURM, name in _OF_SWEEPS, True)
                sections[headings[kinds.index(True)]].append(record)
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


class Verbs(click.Group):
    """A group whose verbs take PATH=VALUE among their arguments as --set PATH=VALUE."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, verb, rest = super().resolve_command(ctx, args)
        if verb is not None and any(param.name == "overrides" for param in verb.params):
            before, positional = _with_set_options(verb, rest, ctx.resilient_parsing)
            after = rest[rest.index("--") + 1 :] if "--" in rest else []
            if after and any(param.name == "command" for param in verb.params):
                from slurmllm.cli.command_line import with_command

                rest = with_command(before, positional, after)
            else:
                rest = [*before, "--", *after] if after else before
        return name, verb, rest


def _with_set_options(
    verb: click.Command, arguments: list[str], lenient: bool
) -> tuple[list[str], list[str]]:
    """Return arguments up to `--` with --set before each PATH=VALUE, and the positional ones.

    Raises:
        UserError: a field of a recipe is written as an option, unless `lenient`.
    """
    options = [param for param in verb.params if isinstance(param, click.Option)]
    values = {name: 0 if option.is_flag else 1 for option in options for name in option.opts}
    result, positional, rest = list[str](), list[str](), list(arguments)
    while rest and rest[0] != "--":
        argument = rest.pop(0)
        option, equals, value = argument.partition("=")
        if not lenient and option.startswith("--") and "." in option:
            from slurmllm.errors import UserError

            if not equals:
                value = rest[0] if rest and not rest[0].startswith("-") else "VALUE"
            setting = f"{option[2:].replace('-', '_')}={value}"
            raise UserError(f"{option}: no option, but a field; write {shlex.quote(setting)}")
        is_setting = _SETTING.fullmatch(argument)
        result += ["--set", argument] if is_setting else [argument]
        positional += [] if is_setting or argument.startswith("-") else [argument]
        count = values.get(argument, 0)  # of the option's values, which may look like settings
        result, rest = result + rest[:count], rest[count:]
    return result, positional
