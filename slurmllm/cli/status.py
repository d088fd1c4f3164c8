"""`slurmllm status [RUN]`: the status of runs, once or refreshed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from slurmllm.cli import options

if TYPE_CHECKING:
    from slurmllm.cli.status_tables import View
    from slurmllm.status.runs import RunState

_INTERVAL_S = 5.0


class _Status(click.Command):
    """Allows `--watch` without seconds, before a run's name too."""

    # click's optional option value would take a run's name for the seconds.
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        found = list(args)
        for place, following in enumerate([*args[1:], ""]):
            if args[place : place + 1] == ["--watch"]:
                try:
                    float(following)
                except ValueError:
                    found[place] = f"--watch={_INTERVAL_S:g}"
        return super().parse_args(ctx, found)


@click.command(cls=_Status)
@click.argument("run", required=False)
@click.option(
    "--watch",
    type=float,
    metavar="[SECONDS]",
    help=f"Refresh every SECONDS (default {_INTERVAL_S:g}) until all shown runs have ended.",
)
@click.option("--active", is_flag=True, help="Only runs that are pending or running.")
@options.runs_dir
@options.as_json
def status(
    run: str | None, watch: float | None, active: bool, runs_dir: str | None, as_json: bool
) -> None:
    """Show the status of RUN, or of all runs.

    --watch ends when the run, or every run shown, has ended. If the output is not a terminal, it
    prints one table after the other; with --json, one document per line.
    """
    from slurmllm.errors import EXIT_INTERRUPTED, UserError

    if active and run is not None:
        raise UserError(f"--active selects among all runs: leave out --active or the run {run!r}")
    if watch is not None and not 0.1 <= watch <= 86400:
        raise UserError(f"--watch {watch:g}: seconds from 0.1 to 86400, such as --watch 5")
    look = _make_look(run, runs_dir, active)
    if watch is None:
        shown = look()
        click.echo(shown.as_json(indent=2)) if as_json else shown.print()
        return
    try:
        _watch(look, watch, as_json)
    except KeyboardInterrupt:  # the usual way to leave
        click.get_current_context().exit(EXIT_INTERRUPTED)


class _Shown:
    """The states of one refresh."""

    def __init__(self, states: list[RunState], nothing: str | None) -> None:
        # nothing: the text if no run is to be shown; None if one run was named.
        self.states, self.nothing = states, nothing

    def as_json(self, indent: int | None = None) -> str:
        import json

        found = [_state_json(state) for state in self.states]
        return json.dumps(found[0] if self.nothing is None else {"runs": found}, indent=indent)

    def view(self, height: int | None = None) -> View:
        from rich.text import Text

        from slurmllm.cli.status_tables import View, run_view, runs_view
        from slurmllm.tables import console

        if self.nothing is None:
            return run_view(self.states[0], console())
        if not self.states:
            return View([Text(self.nothing)], ())
        return runs_view(self.states, console(), height)

    def print(self) -> None:
        from slurmllm.tables import console  # rich, which --json does not need

        self.view().print(console())

    @property
    def active(self) -> bool:
        return any(state.active for state in self.states)

    @property
    def slurm_unreachable(self) -> bool:
        return any(state.slurm_unreachable for state in self.states)


def _make_look(run: str | None, runs_dir: str | None, active: bool) -> Callable[[], _Shown]:
    """A function that reads the state of a run, or of all runs."""
    from slurmllm.rundir import find_run, runs_root
    from slurmllm.slurm.client import SlurmCommands
    from slurmllm.status.runs import list_runs, run_state, run_states

    root, client = runs_root(runs_dir), SlurmCommands()
    if run is not None:
        found = find_run(run, root)
        return lambda: _Shown([run_state(found, client)], None)

    def look() -> _Shown:
        # Listed anew each time: runs may be submitted meanwhile.
        states = run_states(list_runs(root), client)
        if active and states:
            # Without Slurm nobody knows that a run has ended: such runs stay in the list.
            shown = [state for state in states if state.active or state.slurm_unreachable]
            return _Shown(shown, f"none of the {len(states)} runs in {root} is pending or running")
        hint = "`slurmllm submit tiny_neox --local` starts one"
        return _Shown(states, f"no runs in {root} yet; {hint}")

    return look


def _watch(look: Callable[[], _Shown], interval_s: float, as_json: bool) -> None:
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from slurmllm.tables import console

    terminal = console()
    if as_json or not terminal.is_terminal:  # a pipe: nothing is redrawn
        for shown in _looks(look, interval_s):
            if as_json:
                click.echo(shown.as_json())
            else:
                click.echo(time.strftime("%Y-%m-%d %H:%M:%S"))
                shown.print()
                click.echo("")
        return
    with Live(console=terminal, auto_refresh=False, vertical_overflow="crop") as live:
        for shown in _looks(look, interval_s):
            # Five lines: headings, clock, notes on columns and rows without room.
            view = shown.view(max(terminal.height - 5, 1))
            clock = time.strftime("%H:%M:%S") + f", every {interval_s:g} s; Ctrl-C leaves"
            live.update(
                Group(*view.lines, *view.tables, *view.notes, Text(clock, style="dim")),
                refresh=True,
            )


def _looks(look: Callable[[], _Shown], interval_s: float) -> Iterator[_Shown]:
    """Look again and again until no run shown is active.

    While slurmctld is unreachable, runs that were active before are not taken for ended.
    """
    begun = False
    while True:
        shown = look()
        yield shown
        begun = begun or shown.active
        if not shown.active and not (begun and shown.slurm_unreachable):
            return
        time.sleep(interval_s)


def _state_json(state: RunState) -> dict[str, Any]:
    from dataclasses import asdict

    found = asdict(state)
    found["attempts"] = [a.model_dump(mode="json", by_alias=True) for a in state.attempts]
    del found["details"]
    if (more := state.details) is None:
        return {name: _finite(value) for name, value in found.items()}
    found |= {
        "cold_first_step_s": more.cold_first_step_s,
        "first_steps": {
            node: {"first_step_s": seconds, "cache_hits": hits, "cache_misses": misses}
            for node, (seconds, hits, misses) in more.first_steps.items()
        },
        "mesh": more.mesh.to_json() if more.mesh else None,
        "micro_batch": more.micro_batch.model_dump(mode="json") if more.micro_batch else None,
        # The list of files would be longer than all the rest.
        "graphs": more.graphs.model_dump(mode="json", exclude={"files"}) if more.graphs else None,
        "uncompiled": list(more.uncompiled),
        "versions": more.versions,
        "unequal_versions": more.unequal_versions,
        "excluded": [node.model_dump(mode="json") for node in more.excluded],
        "workers": asdict(more.workers) if more.workers is not None else None,
        "skips": [skip.model_dump(mode="json") for skip in more.skips],
        "warnings": [more.unequal_versions] if more.unequal_versions else [],
    }
    return {name: _finite(value) for name, value in found.items()}


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: such a loss becomes null."""
    import math

    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value
