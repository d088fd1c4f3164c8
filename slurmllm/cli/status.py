"""`slurmllm status [RUN...]`: prints the status of runs once, or refreshes it (`--watch`)."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.exceptions import Exit

from slurmllm.cli import options
from slurmllm.core.display.tables import console, print_line
from slurmllm.core.errors import EXIT_INTERRUPTED, UserError
from slurmllm.core.format import Texts
from slurmllm.core.run.rundir import RunDir, SweepDir, find_run_or_sweep

if TYPE_CHECKING:
    from rich.text import Text

    from slurmllm.analysis.status.runs import RunState, SweepState
    from slurmllm.core.slurm.client import SlurmClient

_INTERVAL_S = 5.0


class _StatusCommand(click.Command):
    """A command with an optional value of `--watch`, also before a run's name."""

    # click's own optional values would parse `--watch RUN` as RUN seconds.
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        completed = list(args)
        for index, (arg, next_arg) in enumerate(pairwise([*args, ""])):
            if arg == "--watch":
                try:
                    float(next_arg)
                except ValueError:
                    completed[index] = f"--watch={_INTERVAL_S:g}"
        return super().parse_args(ctx, completed)


@click.command(cls=_StatusCommand)
@options.run_argument("runs", nargs=-1, metavar="[RUN...]")
@click.option("--watch", type=float, metavar="[SECONDS]", help="Refresh every SECONDS (default 5).")
@options.flag("--active", "Show only runs that are pending or running.")
@options.runs_dir
@options.as_json
def status(
    runs: Texts,
    watch: float | None,
    active: bool,
    runs_dir: Path,
    as_json: bool,
) -> None:
    """Show the status of runs, of a sweep, or of all runs.

    Several runs are a list, with --json as without a name. --watch ends when all shown runs have
    ended. If the output is not a terminal, each refresh prints another table; with --json, one
    document per line.
    """
    from slurmllm.core.slurm.client import SlurmClient

    if active and runs:
        raise UserError(
            f"--active cannot be combined with a run: leave out --active or {runs[0]!r}"
        )
    if watch is not None and not 0.1 <= watch <= 86400:
        raise UserError(f"--watch {watch:g}: must be 0.1 to 86400 seconds, such as --watch 5")
    targets = [find_run_or_sweep(name, runs_dir) for name in dict.fromkeys(runs)]
    read_states = partial(_read_states, targets, runs_dir, active, SlurmClient())
    if watch is None:
        states = read_states()
        click.echo(states.as_json(indent=2)) if as_json else states.print()
        return
    try:
        _watch(read_states, watch, as_json)
    except KeyboardInterrupt:  # the usual way to stop watching
        raise Exit(EXIT_INTERRUPTED) from None


@dataclass
class _ShownStates:
    """The states of one refresh; `empty_text` is for no runs, and None if a run was given."""

    states: Sequence[RunState]
    empty_text: str | None
    sweep: SweepState | None = None

    def as_json(self, indent: int | None = None) -> str:
        runs = [state.to_dict() for state in self.states]
        of_sweep = self.sweep.to_json() if self.sweep is not None else {}
        listing = runs[0] if self.empty_text is None else {**of_sweep, "runs": runs}
        return json.dumps(listing, indent=indent)

    def view(self, height: int | None = None) -> Iterator[Text]:
        from rich.text import Text

        from slurmllm.cli.status_tables import run_view, runs_view

        if self.empty_text is None:
            yield from run_view(self.states[0], console())
        elif not self.states:
            yield Text(self.empty_text)
        else:
            if self.sweep is not None:
                yield Text(f"sweep {self.sweep.sweep.name}, {self.sweep.summary}")
            yield from runs_view(self.states, console(), height)

    def print(self) -> None:
        for message in self.view():
            print_line(message)


def _read_states(
    targets: Sequence[RunDir | SweepDir], runs_dir: Path, active: bool, client: SlurmClient
) -> _ShownStates:
    """Read the states of the named runs and sweeps, or of all runs."""
    from slurmllm.analysis.status.runs import list_runs, read_sweep, run_state, run_states
    from slurmllm.core.run.records import runs_of

    if len(targets) > 1:
        runs = dict.fromkeys(chain.from_iterable(map(runs_of, targets)))
        return _ShownStates(run_states(list(runs), client), "all these runs were removed")
    for target in targets:
        if isinstance(target, RunDir):
            return _ShownStates([run_state(target, client)], None)
        sweep = read_sweep(target, client)
        message = f"{target.name}: all runs of the sweep were removed"
        return _ShownStates(sweep.runs, message, sweep)
    # Listed at each refresh: runs may be submitted in between.
    states = run_states(list_runs(runs_dir), client)
    message = f"no runs in {runs_dir} yet; `slurmllm submit tiny_neox --local` starts one"
    if active and states:
        message = f"none of the {len(states)} runs in {runs_dir} is pending or running"
        # While slurmctld is unreachable, these runs may still be active: they stay in the list.
        states = [state for state in states if state.active or state.slurm_unreachable]
    return _ShownStates(states, message)


def _watch(read_states: Callable[[], _ShownStates], interval_s: float, as_json: bool) -> None:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    terminal = console()
    if as_json or not terminal.is_terminal:  # nothing can be redrawn in a pipe or file
        for listing in _refresh_until_ended(read_states, interval_s):
            if as_json:
                click.echo(listing.as_json())
            else:
                click.echo(time.strftime("%Y-%m-%d %H:%M:%S"))
                listing.print()
                click.echo()
        return
    # The raw stream: drawing again needs sequences that are removed from the texts.
    raw = Console(file=sys.__stdout__, highlight=False)
    with Live(console=raw, auto_refresh=False, vertical_overflow="crop") as live:
        for listing in _refresh_until_ended(read_states, interval_s):
            # Five lines are reserved: headings, clock, notes on omitted columns and rows.
            view = listing.view(max(terminal.height - 5, 1))
            clock = f"{time.strftime('%H:%M:%S')}, refreshed every {interval_s:g} s; Ctrl-C to stop"
            live.update(Group(*view, Text(clock, style="dim")), refresh=True)


def _refresh_until_ended(
    read_states: Callable[[], _ShownStates], interval_s: float
) -> Iterator[_ShownStates]:
    """Yield the states every `interval_s` until no shown run is active.

    While slurmctld is unreachable, continues if a run was active before: it may still be active.
    """
    was_active = False
    while True:
        listing = read_states()
        yield listing
        if any(state.active for state in listing.states):
            was_active = True
        elif not (was_active and any(state.slurm_unreachable for state in listing.states)):
            return
        time.sleep(interval_s)
