"""`slurmllm status [RUN]`: where the runs stand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from slurmllm.cli import options

if TYPE_CHECKING:
    from slurmllm.plan.mesh import Mesh
    from slurmllm.records import AttemptRecord, GraphManifest, MicroBatchRecord
    from slurmllm.supervise.standing import Standing
    from slurmllm.supervise.state import RunState


@click.command()
@click.argument("run", required=False)
@options.runs_dir
@options.as_json
def status(run: str | None, runs_dir: str | None, as_json: bool) -> None:
    """Show where RUN stands, or all runs."""
    import json

    from slurmllm.rundir import find_run, runs_root
    from slurmllm.slurm.client import SlurmCommands
    from slurmllm.supervise.state import all_runs, any_state, run_state

    root = runs_root(runs_dir)
    client = SlurmCommands()
    if run is not None:
        one = run_state(find_run(run, root), client)
        if as_json:
            click.echo(json.dumps(_as_json(one), indent=2))
        else:
            _print_one(one)
        return
    states = [any_state(found, client) for found in all_runs(root)]
    if as_json:
        click.echo(json.dumps({"runs": [_as_json(state) for state in states]}, indent=2))
    elif states:
        _print_all(states)
    else:
        click.echo(f"no runs in {root} yet; `slurmllm submit tiny_neox --local` makes one")


def _as_json(state: RunState) -> dict[str, Any]:
    from dataclasses import asdict

    attempts = [attempt.model_dump(mode="json", by_alias=True) for attempt in state.attempts]
    first = {
        node: {"first_step_s": seconds, "cache_hits": hits, "cache_misses": misses}
        for node, (seconds, hits, misses) in state.first_steps.items()
    }
    return {
        **asdict(state),
        "attempts": attempts,
        "first_steps": first,
        "mesh": state.mesh.to_json() if state.mesh else None,
        "micro_batch": state.micro_batch.model_dump(mode="json") if state.micro_batch else None,
        "graphs": _graphs_as_json(state.graphs),
        "excluded": [node.model_dump(mode="json") for node in state.excluded],
        "skips": [skip.model_dump(mode="json") for skip in state.skips],
        "warnings": [state.unequal_versions] if state.unequal_versions else [],
    }


def _graphs_as_json(manifest: GraphManifest | None) -> dict[str, Any] | None:
    """The manifest without its list of files."""
    return manifest.model_dump(mode="json", exclude={"files"}) if manifest is not None else None


def _print_all(states: list[RunState]) -> None:
    from slurmllm.cli.output import print_table

    headings = ("run", "state", "nodes", "step", "loss", "seq/s", "left", "attempts", "why")
    rows = (
        (
            state.name,
            state.state,
            str(state.nodes),
            f"{state.step}/{state.steps}",
            _number(state.metrics.get("loss"), ".4f"),
            _number(state.metrics.get("seq_per_s"), ".1f"),
            _duration(state.eta_s),
            str(len(state.attempts)),
            state.why,
        )
        for state in states
    )
    print_table(headings, rows, fold="why")


def _print_one(state: RunState) -> None:
    import time

    from rich.markup import escape

    from slurmllm.cli.output import console, print_table

    why = f"  ({state.why})" if state.why else ""
    rows = [
        ("run", f"{state.name}  recipe {state.recipe}, {state.nodes} node(s)"),
        ("directory", state.run_dir),
        ("state", f"{state.state}{why}"),
        (
            "step",
            f"{state.step}/{state.steps}"
            + (f", {_duration(state.eta_s)} left" if state.eta_s else ""),
        ),
    ]
    if state.standing is not None:
        rows.append(("workers", _doing(state.standing)))
    if state.mesh is not None:
        rows.append(("batch", _batch(state.mesh, state.micro_batch)))
    if state.metrics:
        loss, norm = state.metrics.get("loss"), state.metrics.get("grad_norm")
        rate, tokens = state.metrics.get("seq_per_s"), state.metrics.get("tokens_per_s")
        rows.append(("loss", f"{_number(loss, '.4f')}, gradient norm {_number(norm, '.3f')}"))
        rows.append(("rate", f"{_number(rate, '.1f')} seq/s, {_number(tokens, '.0f')} tokens/s"))
    rows += [
        (f"{stage} job", f"{job.job_id} {job.state} {job.reason}".rstrip())
        for stage, job in state.jobs.items()
    ]
    if state.checkpoints:
        rows.append(("checkpoints", ", ".join(f"step {step}" for step in state.checkpoints)))
    if state.cold_first_step_s is not None:
        cold = f"first step {state.cold_first_step_s:.1f} s with an empty cache (precompile)"
        warm = "; ".join(
            f"{node} {seconds:.1f} s, {hits} hits, {misses} misses"
            for node, (seconds, hits, misses) in list(state.first_steps.items())[:4]
        )
        rows.append(("graph cache", f"{cold}{'; last attempt: ' + warm if warm else ''}"))
    if state.graphs is not None and state.graphs.taken_from is not None:
        rows.append(("graphs", f"compiled by run {state.graphs.taken_from}"))
    rows += [("uncompiled", line) for line in state.uncompiled]
    if state.attempts and state.attempts[-1].graphs_added:
        added = state.attempts[-1].graphs_added
        words = ", ".join(added[:4]) + (" …" if len(added) > 4 else "")
        rows.append(("graphs added", f"{len(added)} by the last attempt: {words}"))
    rows += [
        ("keeps off", f"{n.node} until {time.ctime(n.until)}: {n.reason}") for n in state.excluded
    ]
    rows += [("skips", f"batches {skip.first}–{skip.last}: {skip.reason}") for skip in state.skips]
    if state.unequal_versions:
        rows.append(("warning", state.unequal_versions))
    terminal = console()
    for name, value in rows:
        terminal.print(f"[bold]{name:<14}[/bold] {escape(value)}", soft_wrap=True)
    if not state.attempts:
        return
    headings = ("attempt", "nodes", "steps", "checkpoint", "time", "ending", "action", "evidence")
    open_word = "running" if state.state == "training" else "not recorded"
    attempts = (_attempt_row(attempt, open_word) for attempt in state.attempts)
    print_table(headings, attempts, fold="evidence")


def _batch(mesh: Mesh, measured: MicroBatchRecord | None) -> str:
    """`8 = data 2 × 1 × micro batch 4`, and where that came from."""
    if mesh.unmeasured:
        return f"{mesh.global_batch}; micro batch auto: measured by the precompile stage"
    words = (
        f"{mesh.global_batch} = data {mesh.data} × {mesh.accumulation} × micro batch "
        f"{mesh.micro_batch}"
    )
    if measured is None:
        return words
    tried = ", ".join(str(candidate.micro_batch) for candidate in measured.candidates)
    return f"{words}; auto: {measured.micro_batch} chosen of {tried} on {measured.nodes[0]}"


def _doing(standing: Standing) -> str:
    """`stepping after step 41`, and how long nothing has moved, where that is worth a word."""
    words = f"{standing.phase.replace('_', ' ')} after step {standing.step}"
    if standing.unchanged_s >= 10:
        what = "no step" if standing.phase == "stepping" else "no change"
        words += f", {what} for {_duration(standing.unchanged_s)}"
        if standing.limit_s is not None:
            words += f" (limit {_duration(standing.limit_s)})"
    if standing.behind:
        ranks = ", ".join(map(str, standing.behind[:8]))
        words += f"; behind the others: rank {ranks}" + (" …" if len(standing.behind) > 8 else "")
    return words


def _attempt_row(attempt: AttemptRecord, open_word: str) -> tuple[str, ...]:
    ended = attempt.ended_at
    return (
        str(attempt.attempt),
        " ".join(attempt.nodes[:4]) + (" …" if len(attempt.nodes) > 4 else ""),
        f"{attempt.first_step}–{attempt.last_step}" if attempt.last_step else "",
        str(attempt.checkpoint_after or ""),
        _duration(ended - attempt.started_at) if ended else "",
        attempt.ending or open_word,
        attempt.action or "",
        "; ".join(attempt.evidence),
    )


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
