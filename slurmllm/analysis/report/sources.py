"""Reads the facts of a report: of run directories, whole or in part, and of other logs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from slurmllm.analysis.evaluate.scores import score_tables
from slurmllm.analysis.report.facts import (
    CheckpointFacts,
    CheckpointState,
    Rate,
    RunFacts,
    Runs,
    throughput_by_nodes,
)
from slurmllm.analysis.spikes import SpikeAnalysis, analyze
from slurmllm.analysis.status.history import (
    RunHistory,
    read_history,
    read_incarnations,
    read_submissions,
)
from slurmllm.analysis.status.recoveries import find_recoveries
from slurmllm.analysis.status.utilization import account_node_hours
from slurmllm.core.config.command import CommandConfig
from slurmllm.core.config.load import LenientConfig, load_leniently
from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.errors import RunError, SlurmllmError
from slurmllm.core.format import Values, format_plural
from slurmllm.core.metrics.curves import Curve
from slurmllm.core.metrics.merge import FileRows
from slurmllm.core.metrics.row_reader import read_events
from slurmllm.core.metrics.source import distinct_names, read_curve
from slurmllm.core.run.artifact_records import DataRecord
from slurmllm.core.run.records import Attempts, Event, NodeRecord
from slurmllm.core.run.rundir import RunDir, read_all, storage_errors
from slurmllm.core.run.safe_files import os_error_text
from slurmllm.core.slurm.client import SlurmClient
from slurmllm.plan.mesh import Mesh, load_mesh
from slurmllm.plan.prices import NodePrice, select_price
from slurmllm.train.checkpoint.catalogue import invalidated_checkpoints, list_checkpoints
from slurmllm.train.checkpoint.foreign import list_trainer_checkpoints

if TYPE_CHECKING:
    from slurmllm.analysis.compare.result import Comparison

T = TypeVar("T")

_PARTS_OF_A_RUN = ("config.yaml", "jobs.json", "attempts", "metrics")


def find_run_directory(source: str, root: Path) -> Path | None:
    """Return the run directory, whole or in part, that an argument names; None if it is not one.

    Raises:
        RunError: a folder cannot be read.
    """
    if not source.strip():
        return None
    fix = "give a run's name or a readable file of metrics"
    for path in (root / source, Path(source).absolute()):
        with storage_errors(f"cannot read {path}", fix, RunError):
            if _is_run_or_part(path):
                return path.resolve() if path.name in ("", "..") else path
    return None


def _is_run_or_part(path: Path) -> bool:
    parts = {name for name in _PARTS_OF_A_RUN if (path / name).exists()}
    # Other frameworks too keep a config.yaml or a folder `metrics` with their event files.
    foreign = parts <= {"config.yaml", "metrics"} and any(path.glob("*tfevents*"))
    return path.is_dir() and bool(parts) and not foreign


def read_run_facts(
    source: Path, of_log: Values, price: float | None, client: SlurmClient
) -> RunFacts:
    """Read a run, whole or in part, or another framework's log.

    `of_log` has arguments of `read_curve`, such as the tags; without a `price` it is on demand, if
    known.

    Raises:
        RunError: the source is not a run, and its metrics cannot be read.
    """
    warnings: list[str] = []
    if _is_run_or_part(source):  # whatever is readable of it
        metrics: FileRows = {}
        curve = warn_on_error(
            lambda: read_curve(source, lenient=True, by_file=metrics, **of_log), warnings
        )
        return _read_run(RunDir(source), curve, metrics, warnings, price, client)
    curve = read_curve(source, lenient=True, **of_log)
    return RunFacts(
        name=curve.name,
        path=source,
        kind="jsonl" if curve.kind == "run" else curve.kind,
        curve=curve,
        rates=throughput_by_nodes(curve, {}, None, price),
        spikes=_find_spikes(curve, warnings),
        price=_price(None, price),
        warnings=(*curve.warnings, *warnings),
    )


def _warn_of_lost_steps(run: RunDir, history: RunHistory, warnings: list[str]) -> None:
    for attempt in history.attempts:
        number = attempt.attempt
        last = attempt.last_step
        if attempt.stage == "train" and last is not None and number not in history.steps:
            warnings.append(
                f"train attempt {number} completed steps {attempt.first_step} to {last}, but "
                f"{run.metrics(number)} lacks them: none of its time is productive"
            )


def _throughput_rates(
    curve: Curve,
    attempts: Attempts,
    mesh: Mesh | None,
    configuration: LenientConfig,
    usd: float | None,
) -> list[Rate]:
    sizes = {a.attempt: (len(a.nodes), a.world_size) for a in attempts if a.stage == "train"}
    if not sizes and mesh is not None:  # metrics were copied without the records
        planned = (mesh.nodes, mesh.world_size)
        sizes = dict.fromkeys(set(curve.attempts.tolist()), planned)
    return throughput_by_nodes(curve, sizes, configuration.config, usd)


def _read_run(
    run: RunDir,
    curve: Curve | None,
    metrics: FileRows,
    warnings: list[str],
    price: float | None,
    client: SlurmClient,
) -> RunFacts:
    configuration = warn_on_error(lambda: load_leniently(run.config), warnings) or LenientConfig()
    warnings += configuration.warnings
    command = None if configuration.config is None else configuration.config.recipe.command
    submissions = read_submissions(run)
    history = warn_on_error(
        lambda: read_history(run, read_incarnations(submissions, client), metrics), warnings
    ) or RunHistory(run.name, ())
    # In a tie the precompile stage came first.
    attempts = sorted(history.attempts, key=lambda a: (a.started_at, a.stage != "precompile"))
    _warn_of_lost_steps(run, history, warnings)
    paid = _price(configuration.config, price)
    usd = None if paid is None else paid.usd
    used = account_node_hours(history, usd)
    mesh = warn_on_error(lambda: load_mesh(run.plan) if run.plan.exists() else None, warnings)
    events = warn_on_error(lambda: list(_read_events(run, history, warnings)), warnings) or ()
    scores, doubts = warn_on_error(lambda: score_tables(run), warnings) or ((), ())
    rates: list[Rate] = []
    if curve is not None:
        warnings += curve.warnings
        rates = _throughput_rates(curve, attempts, mesh, configuration, usd)
    warnings += doubts
    return RunFacts(
        name=run.name,
        path=run.path,
        kind="run",
        configuration=configuration,
        curve=curve,
        mesh=mesh if command is None else None,  # its trainer makes one of its own
        attempts=attempts,
        cancelled=any(submission.cancelled_at is not None for submission in submissions[-1:]),
        used=used,
        lost=list(find_recoveries(history)),
        rates=rates,
        saved=list(read_checkpoints(run, command, events, warnings)),
        scores=scores,
        spikes=None if curve is None else _find_spikes(curve, warnings),
        data=warn_on_error(lambda: DataRecord.find(run.data), warnings),
        versions=warn_on_error(lambda: _read_versions(run, attempts, warnings), warnings) or {},
        events=events,
        price=paid,
        warnings=tuple(dict.fromkeys([*warnings, *used.warnings])),
    )


def _price(config: RunConfig | None, usd: float | None) -> NodePrice | None:
    """Return the price of a node hour; None if it is unknown."""
    if config is not None:
        return select_price(config, usd)
    return None if usd is None else NodePrice(usd)


def read_checkpoints(
    run: RunDir, command: CommandConfig | None, events: Sequence[Event], warnings: list[str]
) -> Iterator[CheckpointFacts]:
    """Yield every checkpoint by step, on disk or only in the events; of two saves the later one.

    Files are not verified. Warnings about unreadable ones are appended to `warnings`.
    """
    saves = {event.step: event for event in events if event.kind == "save"}
    try:
        on_disk = {facts.step: facts for facts in _on_disk(run, command, warnings)}
    except (SlurmllmError, OSError) as error:
        warnings.append(f"checkpoints: {error}")
        on_disk = {}
    for step in sorted(saves.keys() | on_disk.keys()):
        facts = on_disk.get(step, CheckpointFacts(step))
        event = saves.get(step)
        # Not of another save than the one on disk
        if event is not None and facts.attempt in (None, event.attempt):
            facts = replace(
                facts,
                attempt=event.attempt,
                bytes=event.bytes if facts.bytes is None else facts.bytes,
                saved_at=event.time if facts.saved_at is None else facts.saved_at,
                seconds=event.seconds,
                waited_s=event.waited_s,
            )
        yield facts


def _on_disk(
    run: RunDir, command: CommandConfig | None, warnings: list[str]
) -> Iterator[CheckpointFacts]:
    """Yield the checkpoints by their manifests; of another trainer, as they look from outside."""
    if command is not None:
        for seen in list_trainer_checkpoints(run, command):
            state: CheckpointState = "kept" if seen.complete else "damaged"
            yield CheckpointFacts(seen.step, saved_at=seen.changed_at, state=state)
        return
    entries = list_checkpoints(run)
    manifests = {entry.step: entry.manifest for entry in entries if entry.manifest}
    invalidated = invalidated_checkpoints(run, manifests)
    for entry in entries:
        if (manifest := entry.manifest) is None:
            warnings += [f"{entry.directory}: {fault}" for fault in entry.faults or ()]
            yield CheckpointFacts(entry.step, state="damaged")
            continue
        yield CheckpointFacts(
            step=entry.step,
            attempt=manifest.attempt,
            tokens=manifest.tokens,
            bytes=entry.num_bytes,
            saved_at=manifest.saved_at,
            seconds=manifest.save_s,
            state="invalidated" if entry.step in invalidated else "kept",
        )


def warn_on_error(read: Callable[[], T], warnings: list[str]) -> T | None:
    """Return the result of a reader; None, with a warning, if its file cannot be read."""
    try:
        return read()
    except SlurmllmError as error:
        warnings.append(str(error))
    except OSError as error:
        warnings.append(f"cannot read {error.filename}: {os_error_text(error)}")
    return None


def _read_events(run: RunDir, history: RunHistory, warnings: list[str]) -> Iterator[Event]:
    attempts = {attempt.attempt for attempt in history.attempts if attempt.stage == "train"}
    for number in sorted(attempts | set(history.steps)):
        left_out: list[int] = []
        yield from read_events(run, number, left_out)
        if left_out:
            lines = format_plural(len(left_out), "line")
            warnings.append(
                f"{run.events(number)}:{left_out[0]}: ignoring {lines}: not an event, "
                "cut off, or of a newer version of slurmllm"
            )


def _find_spikes(curve: Curve, warnings: list[str]) -> SpikeAnalysis | None:
    logged = {"loss", "grad_norm"} & curve.columns.keys()
    return warn_on_error(lambda: analyze(curve), warnings) if logged else None


def _read_versions(run: RunDir, attempts: Attempts, warnings: list[str]) -> dict[str, str]:
    """Return the versions on the nodes of the last attempt that recorded them."""
    for attempt in reversed(attempts):
        folder = attempt.files(run).path / "nodes"
        versions: dict[str, set[str]] = defaultdict(set)
        for record in read_all(
            lambda path: warn_on_error(lambda: NodeRecord.load(path), warnings),
            sorted(folder.glob("*.json")),
        ):
            for name, version in record.versions.items() if record else ():
                versions[name].add(version)
        if versions:
            return {name: ", ".join(sorted(values)) for name, values in versions.items()}
    return {}


def name_and_compare(runs: Runs) -> list[RunFacts]:
    """Tell sources of equal names apart; compare each run with the first one that has a loss."""
    if len(runs) == 1:
        return [*runs]
    names = distinct_names([facts.name for facts in runs], [facts.path for facts in runs])
    for index in reversed(range(len(names))):
        if count := names[:index].count(names[index]):  # of one source, read in two ways
            names[index] += f" ({count + 1})"
    runs = list(map(_with_name, runs, names))
    from slurmllm.analysis.compare.compare import compare  # not loaded for a single run
    from slurmllm.analysis.compare.result import curve_letter

    curves = [facts.curve for facts in runs if facts.curve and facts.loss is not None]
    results: dict[str, Comparison | str] = {}
    for number, curve in enumerate(curves[1:], 1):
        try:
            results[curve.name] = compare(curves[0], curve, letter=curve_letter(number))
        except RunError as error:
            results[curve.name] = str(error)
    return [replace(facts, comparison=results.get(facts.name)) for facts in runs]


def _with_name(facts: RunFacts, name: str) -> RunFacts:
    curve = facts.curve and replace(facts.curve, name=name)
    spikes = facts.spikes and facts.spikes.model_copy(update={"name": name})
    return replace(facts, name=name, curve=curve, spikes=spikes)
