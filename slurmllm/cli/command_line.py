"""`slurmllm submit … -- COMMAND`: a trainer's command line among the arguments."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from slurmllm.config.profiles import TRAINERS


def with_command(
    before: Sequence[str], positional: Sequence[str], after: Sequence[str]
) -> list[str]:
    """Return arguments in which the command line after `--` is the option --command.

    After a RECIPE, if the first argument after `--` begins with a dash, all are options of sbatch.
    Without a RECIPE, or after an adapter (trainers/NAME), only those before the first argument
    without a dash are, each as `--name=value`; the command begins there.
    """
    options = list(takewhile(lambda word: word.startswith("-"), after))
    is_adapter = bool(positional) and positional[0].startswith(f"{TRAINERS}/")
    if (options and positional and not is_adapter) or len(options) == len(after):
        return [*before, "--", *after]
    from slurmllm.config.command import join_words, name_of_command

    words = after[len(options) :]
    # Without a RECIPE the name is that of the program.
    name = f'--set=name="{name_of_command(words)}"'
    added = [] if positional else [f"{TRAINERS}/plain", name]
    return [
        *added,
        *before,
        f"--command={join_words(words)}",
        *(["--", *options] if options else []),
    ]


def command_settings(command: str | None) -> dict[str, tuple[str, Any]]:
    """Return the setting of --command, as `resolve` takes it."""
    return {} if command is None else {"command.run": ("command line", command)}
