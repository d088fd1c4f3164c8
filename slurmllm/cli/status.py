"""`slurmllm status [RUN]`: where the runs stand, once or again and again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from slurmllm.cli import options

if TYPE_CHECKING:
    from slurmllm.cli.status_tables import View
    from slurmllm.records import GraphManifest
    from slurmllm.status.details import Details
    from slurmllm.status.runs import RunState

_INTERVAL_S = 5.0


class _Status(click.Command):
    """Lets `--watch` stand without seconds, before a run's name too."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        after = [*args[1:], ""]
        found = [
            f"--watch={_INTERVAL_S:g}" if one == "--watch" and not _is_number(following) else one
            for one, following in zip(args, after, strict=False)
        ]
        return super().parse_args(ctx, found)


@click.command(cls=_Status)
@click.argument("run", required=False)
@click.option(
    "--watch",
    type=float,
    metavar="[SECONDS]",
    help=f"Draw it anew every so often ({_INTERVAL_S:g} s), until nothing shown waits or runs.",
)
@click.option("--active", is_flag=True, help="Of all runs, those alone that wait or run.")
@options.runs_dir
@options.as_json
def status(
    run: str | None, watch: float | None, active: bool, runs_dir: str | None, as_json: bool
) -> None:
    """Show where RUN stands, or all runs.

    With --watch it ends when the run has ended, or when of all runs none waits or runs any more;
    where the output is no terminal, it prints one picture after the other, with --json one
    document a line.
    """
    from slurmllm.errors import EXIT_INTERRUPTED, UserError

    if active and run is not None:
        raise UserError(f"--active chooses among all runs; leave it out, or the run {run!r}")
    if watch is not None and not 0.1 <= watch <= 86400:
        raise UserError(f"--watch {watch:g}: seconds from 0.1 to 86400, such as --watch 5")
    look = _one(run, runs_dir) if run is not None else _several(runs_dir, active)
    if watch is None:
        shown = look()
        click.echo(shown.as_json(indent=2)) if as_json else shown.print()
        return
    try:
        _watch(look, watch, as_json)
    except KeyboardInterrupt:  # the usual way to leave
        click.get_current_context().exit(EXIT_INTERRUPTED)


class _Shown:
    """What was found at one look."""

    def __init__(self, states: list[RunState], nothing: str | None) -> None:
        self.states, self.nothing = states, nothing  # None: it is one run that was asked for

    def as_json(self, indent: int | None = None) -> str:
        import json

        found = [_as_json(state) for state in self.states]
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
        from slurmllm.tables import console

        self.view().print(console())

    @property
    def goes_on(self) -> bool:
        """Whether anything shown waits or runs."""
        return any(state.active for state in self.states)

    @property
    def not_told(self) -> bool:
        """Whether Slurm did not answer for some of it."""
        return any(state.not_told for state in self.states)


def _one(run: str, runs_dir: str | None) -> Callable[[], _Shown]:
    from slurmllm.rundir import find_run, runs_root
    from slurmllm.slurm.client import SlurmCommands
    from slurmllm.status.runs import run_state

    found, client = find_run(run, runs_root(runs_dir)), SlurmCommands()
    return lambda: _Shown([run_state(found, client)], None)


def _several(runs_dir: str | None, active: bool) -> Callable[[], _Shown]:
    from slurmllm.rundir import runs_root
    from slurmllm.slurm.client import SlurmCommands
    from slurmllm.status.runs import list_runs, run_states

    root, client = runs_root(runs_dir), SlurmCommands()

    def look() -> _Shown:
        states = run_states(list_runs(root), client)
        if active and states:
            shown = [state for state in states if state.active or state.not_told]
            return _Shown(shown, f"none of the {len(states)} runs in {root} waits or runs")
        hint = "`slurmllm submit tiny_neox --local` makes one"
        return _Shown(states, f"no runs in {root} yet; {hint}")

    return look


def _watch(look: Callable[[], _Shown], interval_s: float, as_json: bool) -> None:
    from slurmllm.tables import console

    terminal = console()
    if terminal.is_terminal and not as_json:
        _redraw(look, interval_s)
        return
    for shown in _looks(look, interval_s):
        if as_json:
            click.echo(shown.as_json())
        else:
            click.echo(time.strftime("%Y-%m-%d %H:%M:%S"))
            shown.print()
            click.echo("")


def _redraw(look: Callable[[], _Shown], interval_s: float) -> None:
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from slurmllm.tables import console

    terminal = console()
    with Live(console=terminal, auto_refresh=False, vertical_overflow="crop") as live:
        for shown in _looks(look, interval_s):
            # The headings, the clock and a line for what there is no room for.
            view = shown.view(max(terminal.height - 5, 1))
            clock = time.strftime("%H:%M:%S") + f", every {interval_s:g} s; Ctrl-C leaves"
            live.update(
                Group(*view.lines, *view.tables, *view.notes, Text(clock, style="dim")),
                refresh=True,
            )


def _looks(look: Callable[[], _Shown], interval_s: float) -> Iterator[_Shown]:
    """One look after the other, until nothing goes on.

    While Slurm does not answer, what it was known to run is not taken for ended.
    """
    begun = False
    while True:
        shown = look()
        yield shown
        begun = begun or shown.goes_on
        if not shown.goes_on and not (begun and shown.not_told):
            return
        time.sleep(interval_s)


def _as_json(state: RunState) -> dict[str, Any]:
    from dataclasses import asdict

    found = asdict(state)
    found["attempts"] = [a.model_dump(mode="json", by_alias=True) for a in state.attempts]
    del found["details"]
    if state.details is not None:
        found |= _details_as_json(state.details)
    return {name: _sound(value) for name, value in found.items()}


def _details_as_json(more: Details) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "cold_first_step_s": more.cold_first_step_s,
        "first_steps": {
            node: {"first_step_s": seconds, "cache_hits": hits, "cache_misses": misses}
            for node, (seconds, hits, misses) in more.first_steps.items()
        },
        "mesh": more.mesh.to_json() if more.mesh else None,
        "micro_batch": more.micro_batch.model_dump(mode="json") if more.micro_batch else None,
        "graphs": _graphs_as_json(more.graphs),
        "uncompiled": list(more.uncompiled),
        "versions": more.versions,
        "unequal_versions": more.unequal_versions,
        "excluded": [node.model_dump(mode="json") for node in more.excluded],
        "standing": asdict(more.standing) if more.standing is not None else None,
        "skips": [skip.model_dump(mode="json") for skip in more.skips],
        "warnings": [more.unequal_versions] if more.unequal_versions else [],
    }


def _graphs_as_json(manifest: GraphManifest | None) -> dict[str, Any] | None:
    """The manifest without its list of files."""
    return manifest.model_dump(mode="json", exclude={"files"}) if manifest is not None else None


def _sound(value: Any) -> Any:
    """What JSON can hold: a loss that is not a number is null."""
    import math

    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _sound(inner) for key, inner in value.items()}
    return [_sound(inner) for inner in value] if isinstance(value, list | tuple) else value


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
