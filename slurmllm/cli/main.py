"""`slurmllm`: the verbs, and the conversion of errors to messages and exit codes."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import sys
import warnings
from functools import partial
from typing import IO, Any

import click

from slurmllm import __version__
from slurmllm.cli import options
from slurmllm.cli.commands import Resolved, Verbs, ignore_output_errors, open_outputs
from slurmllm.core import removed
from slurmllm.core.errors import (
    EXIT_INTERRUPTED,
    CodeError,
    InfrastructureError,
    SlurmllmError,
    StorageError,
    UserError,
)
from slurmllm.core.format import printable
from slurmllm.core.run.safe_files import os_error_text

EXIT_BROKEN_PIPE = 141  # as a shell counts SIGPIPE
# In the order of a run. Only the module of the verb that is called is imported: a launcher or a
# worker, of which a run has thousands, reads few files of the environment.
_VERBS = (
    "init",
    "doctor",
    "health",
    "recipes",
    "plan",
    "calibrate",
    "submit",
    "status",
    "logs",
    "cancel",
    "resume",
    "delete",
    "nodes",
    "data",
    "tokenizer",
    "checkpoint",
    "compare",
    "spikes",
    "report",
    "evaluate",
    "track",
    "drill",
)
# Called on the nodes; they write logs.
_HIDDEN = ["supervise", "launch", "worker", "check-node", "allreduce", "evaluate-checkpoint"]
# The modules that have another name than their verb.
_MODULES = dict.fromkeys(_HIDDEN, "hidden")
_MODULES |= {
    "doctor": "diagnose",
    "health": "diagnose",
    "delete": "cancel",
    "resume": "submit",
    "tokenizer": "data",
}

# What other programs call a verb: Slurm, Kubernetes, other trainers
_SYNONYMS = {
    "submit": "run train start sbatch launch new sweep",
    "status": "ls list ps show info squeue queue watch",
    "cancel": "kill stop scancel abort",
    "delete": "rm remove del purge clean",
    "resume": "continue restart requeue",
    "logs": "tail attach output",
    "recipes": "ls list models configs",
    "plan": "estimate",
    "compare": "diff",
    "data build": "build preprocess prepare",
    "data fetch": "download fetch",
    "checkpoint export": "export",
    "checkpoint import": "import",
    "checkpoint verify": "verify fsck",
}


class _Verbs(Verbs):
    def make_context(self, *arguments: Any, **extra: Any) -> click.Context:
        try:
            return super().make_context(*arguments, **extra)
        except BrokenPipeError:  # `slurmllm --help | true`, for which click would exit with 1
            raise _broken_pipe() from None

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except SlurmllmError as error:
            raise _Failure(error) from error
        except BrokenPipeError:  # `slurmllm logs RUN | head`
            raise _broken_pipe() from None

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Resolved:
        name = args[0]
        is_known = name in self.list_commands(ctx) or removed.verb_message(name) is not None
        if not (name.startswith("-") or is_known or ctx.resilient_parsing):
            from difflib import get_close_matches

            verbs = [verb for verb, synonyms in _SYNONYMS.items() if name in synonyms.split()]
            names = " or ".join(map(repr, verbs or get_close_matches(name, _VERBS, n=1)))
            suggestion = f" Did you mean {names}?" if names else ""
            ctx.fail(f"No such command {name!r}.{suggestion}")
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*_VERBS, *_HIDDEN]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        verbs = importlib.import_module(f"slurmllm.cli.{_MODULES.get(cmd_name, cmd_name)}")
        verb: click.Command = getattr(verbs, cmd_name.replace("-", "_"))
        return verb


class _Failure(click.ClickException):
    """A `SlurmllmError` as click prints it."""

    def __init__(self, error: SlurmllmError) -> None:
        super().__init__(str(error))
        self.exit_code = error.exit_code  # type: ignore[misc]  # click's own subclasses do it

    def show(self, file: IO[Any] | None = None) -> None:
        _print_error(self.message)


def _print_error(message: str) -> None:
    mark = click.style("error:", fg="red", bold=True)
    click.echo(f"{mark} {printable(message)}", err=True)


def _broken_pipe() -> click.exceptions.Exit:
    # Python flushes stdout at its exit, which would print another BrokenPipeError.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return click.exceptions.Exit(EXIT_BROKEN_PIPE)


@click.group(
    cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "show_default": True}
)
@click.version_option(__version__, prog_name="slurmllm")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Train language models on a Slurm cluster: submit, requeue, resume, compare.

    \b
    slurmllm init                          write a profile of this cluster
    slurmllm recipes                       list the recipes
    slurmllm plan neox_20b --nodes 4       choose a mesh; its speed and cost
    slurmllm submit tiny_neox --nodes 4    precompile, then train
    slurmllm status                        status of all runs

    Exit codes: 0 done; 1 the check failed (compare: the runs differ; evaluate: some tasks were not
    scored); 2 invalid input or configuration; 3 Slurm or a node; 4 storage or a checkpoint; 70 an
    error of code; 71 divergence; 72 out of memory; 75 stopped early, to be requeued; 130
    interrupted.
    """
    if ctx.invoked_subcommand not in (*_HIDDEN, "track"):  # these write logs
        handler = _Warnings(logging.WARNING)
        log = logging.getLogger("slurmllm")
        log.addHandler(handler)
        ctx.call_on_close(partial(log.removeHandler, handler))


class _Warnings(logging.Handler):
    """Prints warnings of the package's log on standard error, as commands print theirs."""

    def emit(self, record: logging.LogRecord) -> None:
        options.warn(printable(record.getMessage()))


def main() -> None:
    """Run the console script; exit code 1 is reserved for failed checks of a verb."""
    # A run may be named in a script that matplotlib's font lacks: drawn as boxes then.
    warnings.filterwarnings("ignore", message="Glyph")
    # The thread pool of tokenizers warns at every fork after its first use.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not {*_HIDDEN} & {*sys.argv[1:2]}:
        open_outputs()
        # A command reads many small records at once, none of which it frees before it ends.
        gc.set_threshold(200_000)
    try:
        code = cli.main(prog_name="slurmllm", standalone_mode=False)
        sys.stdout.flush()  # here, so that a full disk is an error and not a traceback at exit
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        code = EXIT_INTERRUPTED
    except UnicodeEncodeError as error:  # before anything was submitted: no file can hold it
        _print_error(f"{error.object!r:.200} is not UTF-8 text; rename it")
        code = UserError.exit_code
    except OSError as error:
        action = f"read {error.filename}" if error.filename else "write the output"
        _print_error(f"cannot {action}: {os_error_text(error)}")
        ignore_output_errors()  # Python flushes once more at its exit
        code = StorageError.exit_code
    except Exception as error:
        import traceback

        if "can't start new thread" in str(error):
            _print_error("the limit of processes and threads is reached; raise it (`ulimit -u`)")
            code = InfrastructureError.exit_code
        else:
            traceback.print_exc()
            _print_error("an internal error of slurmllm; please report the traceback above")
            code = CodeError.exit_code
    sys.exit(code if isinstance(code, int) else 0)
