"""The command line in processes forked from a test: a new one imports for half a second."""

import logging
import os
import pty
import sys
import warnings
from collections.abc import Callable
from typing import NoReturn

import click

from slurmllm.cli.main import cli, main


def run_verb(
    *arguments: str,
    terminal: bool = False,
    prepare: Callable[[], object] = lambda: None,
    **variables: str,
) -> tuple[int, str]:
    """Return exit code and everything printed of the command line in a process forked from here.

    Args:
        terminal: Whether it prints to a terminal, else to a pipe.
        prepare: Called in that process before the command line.
        variables: Changes of its environment.
    """
    cli.get_command(click.Context(cli), arguments[0])  # what the verb imports, once for all
    ours, theirs = pty.openpty() if terminal else os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: of threads
        child = os.fork()
    if child == 0:
        _become(theirs, arguments, {"COLUMNS": "200", "TERM": "xterm"} | variables, prepare)
    os.close(theirs)
    printed = b""
    while True:
        try:
            piece = os.read(ours, 1 << 16)
        except OSError:  # a terminal's end
            break
        if not piece:
            break
        printed += piece
    os.close(ours)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code, printed.decode(errors="replace")


def _become(
    output: int,
    arguments: tuple[str, ...],
    variables: dict[str, str],
    prepare: Callable[[], object],
) -> NoReturn:
    code: object = 99
    try:
        stdin = output if os.isatty(output) else os.open(os.devnull, os.O_RDONLY)
        for descriptor, target in ((stdin, 0), (output, 1), (output, 2)):
            os.dup2(descriptor, target)
        logging.getLogger().handlers.clear()  # pytest's
        sys.stdin, sys.argv = os.fdopen(0), ["slurmllm", *arguments]
        sys.stdout, sys.stderr = (os.fdopen(n, "w", encoding="utf-8") for n in (1, 2))
        sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr
        os.environ.update(variables)
        prepare()
        main()
    except SystemExit as end:
        code = end.code
        sys.stdout.flush()
    finally:
        os._exit(code if isinstance(code, int) else 98)
