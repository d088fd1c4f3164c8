"""`slurmllm track`: the metrics of a run for W&B, MLflow and Prometheus."""

from __future__ import annotations

import logging
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurmllm.cli import options
from slurmllm.core.errors import SlurmError, UserError
from slurmllm.core.run.rundir import find_run

if TYPE_CHECKING:
    from slurmllm.core.config.recipe import TrackerName


log = logging.getLogger(__name__)


@click.group()
def track() -> None:
    """Send the metrics of runs to W&B, MLflow or Prometheus."""


@track.command()
@options.run_argument("run")
@options.choice("--to trackers", "wandb mlflow", "Default: the recipe's.", multiple=True)
@options.flag("--follow -f", "Continue until the run has ended.")
@click.option("--supervised", is_flag=True, hidden=True)
@options.runs_dir
@options.as_json
def sync(
    run: str,
    trackers: tuple[TrackerName, ...],
    follow: bool,
    supervised: bool,
    runs_dir: Path,
    as_json: bool,
) -> None:
    """Send the steps of RUN that a tracker does not have yet.

    All attempts of a run are one run of the tracker. Needs a network, the tracker's package and its
    key; what cannot be sent now is sent by the next call.

    Exit codes: 0 all was sent; 2 a package, a key or an address is missing; 3 a tracker failed.
    """
    from slurmllm.analysis.track import sync as sending
    from slurmllm.core.config.load import load
    from slurmllm.core.log import setup_logging
    from slurmllm.core.slurm.client import SlurmClient, retry_unreachable
    from slurmllm.launch.supervise.run_state import is_active

    run_dir = find_run(run, runs_dir)
    config = load(run_dir.config, trusted=True)
    names = trackers or config.recipe.trackers
    if not names:
        raise UserError(f"{run_dir.name} has no trackers; name one with --to wandb or --to mlflow")
    setup_logging()
    if supervised:
        stop = stop_event()
        sending.sync(run_dir, config, names, stop.is_set, stop.wait)
        return
    client = SlurmClient()
    logged = set[str]()
    if follow:
        retry_unreachable(lambda: is_active(run_dir, client))  # raises without Slurm

    def ended() -> bool:
        try:
            return not (follow and is_active(run_dir, client))
        except SlurmError as error:  # asked again at the next look
            if str(error) not in logged:
                log.warning("%s", error)
            logged.add(str(error))
            return False

    sessions = sending.sync(run_dir, config, names, ended)
    if as_json:
        options.echo_json(
            {
                session.name: {"steps_sent": session.steps_sent, "url": session.record.url}
                for session in sessions
            }
        )
        return
    for session in sessions:
        last_step = max(session.record.last_step, 0)
        url = f"; {session.record.url}" if session.record.url else ""
        click.echo(f"{session.name}: {session.steps_sent} steps sent, up to {last_step}{url}")


@track.command()
@options.run_argument("run")
@click.option("--supervised", is_flag=True, hidden=True)
@options.runs_dir
def prometheus(run: str, supervised: bool, runs_dir: Path) -> None:
    """Print the metrics of RUN in the format of Prometheus.

    While RUN trains, its first node serves them or writes them to a file, if the cluster profile
    sets metrics.port or metrics.textfile.
    """
    from prometheus_client import generate_latest

    from slurmllm.analysis.status.runs import run_states
    from slurmllm.analysis.track.exporter import export
    from slurmllm.analysis.track.prometheus import Page
    from slurmllm.core.config.load import load
    from slurmllm.core.log import setup_logging
    from slurmllm.core.slurm.client import SlurmClient

    run_dir = find_run(run, runs_dir)
    config = load(run_dir.config, trusted=supervised)
    if supervised:
        setup_logging()
        export(run_dir, config, stop_event())
        return
    page = Page(run_dir, config)
    page.update(run_states([run_dir], SlurmClient())[0])
    click.echo(generate_latest(page), nl=False)


def stop_event() -> threading.Event:
    """Return an event that SIGTERM and SIGINT set; ignore the signals for the training."""
    stop = threading.Event()
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return stop
