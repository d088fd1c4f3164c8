"""The checkpoints that a run saved: those on disk, and those that only its events remember."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from slurmllm.checkpoint.catalogue import invalidated_checkpoints, list_checkpoints
from slurmllm.config.resolve import RunConfig
from slurmllm.errors import ConfigError, RunError, SlurmllmError
from slurmllm.evaluate.scores import score_tables
from slurmllm.metrics.curves import Curve
from slurmllm.metrics.row_reader import read_events
from slurmllm.metrics.source import read_curve
from slurmllm.plan.cost import PriceKind, node_price
from slurmllm.plan.mesh import load_mesh
from slurmllm.records import AttemptRecord, DataRecord, Event, NodeRecord
from slurmllm.report.configuration import Configuration, read_configuration
from slurmllm.report.facts import CheckpointFacts, CheckpointState, RunFacts
from slurmllm.report.throughput import Rate, throughput_by_nodes
from slurmllm.rundir import RunDir
from slurmllm.slurm.client import SlurmClient
from slurmllm.spikes import SpikeAnalysis, find_spikes
from slurmllm.status.history import RunHistory, read_history, read_incarnations, read_submissions
from slurmllm.status.recoveries import find_recoveries
from slurmllm.status.utilization import account_node_hours


def read_checkpoints(
    run: RunDir, events: Sequence[Event], warnings: list[str]
) -> Iterator[CheckpointFacts]:
    """Every checkpoint of a run, by step; of one that was saved twice the later save.

    Files are not checked: `slurmllm checkpoint verify` does that.

    Args:
        run: The run.
        events: Beside its steps, oldest first.
        warnings: What cannot be read is added.
    """
    told = {event.step: event for event in events if event.kind == "save"}
    try:
        on_disk = {int(one.directory.name[5:]): one for one in list_checkpoints(run)}
        aside = invalidated_checkpoints(run)
    except (SlurmllmError, OSError) as error:
        warnings.append(f"checkpoints: {error}")
        on_disk, aside = {}, {}
    for step in sorted(told.keys() | on_disk.keys()):
        entry, event = on_disk.get(step), told.get(step)
        manifest = None if entry is None else entry.manifest
        state: CheckpointState = "kept"
        if entry is None:
            state = "removed"
        elif manifest is None:
            state = "damaged"
            warnings += [f"{entry.directory}: {fault}" for fault in entry.faults or ()]
        elif step in aside:
            state = "set aside"
        if manifest is not None and event is not None and event.attempt != manifest.attempt:
            event = None  # of another save than the one on disk
        yield CheckpointFacts(
            step=step,
            attempt=manifest.attempt if manifest else event.attempt if event else None,
            tokens=manifest.tokens if manifest else None,
            num_bytes=entry.num_bytes if entry and manifest else event.bytes if event else None,
            saved_at=manifest.saved_at if manifest else event.time if event else None,
            seconds=event.seconds if event else manifest.save_s if manifest else None,
            waited_s=event.waited_s if event else None,
            state=state,
        )


T = TypeVar("T")

_PARTS_OF_A_RUN = ("config.yaml", "jobs.json", "attempts", "metrics")


def find_run_directory(source: str, root: Path) -> Path | None:
    """The run directory that an argument names, whole or copied in part; None where it does not.

    Args:
        source: A run's name or a directory.
        root: The folder of all runs.

    Raises:
        RunError: a folder cannot be looked at.
    """
    if not source.strip():
        return None
    for path in (root / source, Path(source).absolute()):
        try:
            if _is_run_or_part(path):
                return path.resolve() if path.name in ("", "..") else path
        except OSError as error:
            raise RunError(
                f"cannot look at {path}: {error.strerror or error}; give a run's name or a file "
                "of metrics that you may read"
            ) from error
    return None


def _is_run_or_part(path: Path) -> bool:
    """Other frameworks keep a config.yaml or a folder `metrics` beside their event files too."""
    there = {name for name in _PARTS_OF_A_RUN if (path / name).exists()}
    foreign = there <= {"config.yaml", "metrics"} and any(path.glob("*tfevents*"))
    return path.is_dir() and bool(there) and not foreign


def read_run_facts(
    source: Path,
    tags: Mapping[str, str],
    price: float | PriceKind,
    client: SlurmClient,
) -> RunFacts:
    """Read a run, or another framework's log.

    Args:
        source: A run directory, whole or in part, or whatever `read_curve` reads.
        tags: Metric → the tag that holds it, for logs.
        price: Dollars for an hour of a node, or which one of the cluster profile's.
        client: Slurm, for its accounts.

    Raises:
        RunError: the source is no run, and its metrics cannot be read.
    """
    warnings: list[str] = []
    if _is_run_or_part(source):
        curve = _or_warn(lambda: read_curve(source, tags, lenient=True), warnings)
        return _gather_run(RunDir(source), curve, warnings, price, client)
    curve = read_curve(source, tags, lenient=True)
    usd = price if isinstance(price, float) else None
    return RunFacts(
        name=curve.name,
        path=source,
        kind="jsonl" if curve.kind == "run" else curve.kind,
        curve=curve,
        rates=tuple(throughput_by_nodes(curve, _sizes(curve, (), None), None, usd)),
        spikes=_spikes(curve, warnings),
        usd_per_node_hour=usd,
        warnings=(*curve.warnings, *warnings),
    )


def _gather_run(
    run: RunDir,
    curve: Curve | None,
    warnings: list[str],
    price: float | PriceKind,
    client: SlurmClient,
) -> RunFacts:
    configuration = _or_warn(lambda: read_configuration(run), warnings) or Configuration()
    warnings += configuration.warnings
    config = configuration.config
    history = _or_warn(lambda: _history(run, client), warnings) or RunHistory(run.name, ())
    attempts = tuple(
        sorted(history.attempts, key=lambda a: (a.started_at, a.stage != "precompile"))
    )
    warnings += _without_metrics(run, history)
    usd = _price(price, config, warnings)
    used = account_node_hours(history, usd)
    mesh = _or_warn(lambda: load_mesh(run.plan) if run.plan.is_file() else None, warnings)
    events = _or_warn(lambda: tuple(_events(run, history, warnings)), warnings) or ()
    scores = _or_warn(lambda: score_tables(run), warnings)
    found: list[Rate] = []
    if curve is not None:
        warnings += curve.warnings
        size = None if mesh is None else (mesh.nodes, mesh.world_size)
        found = throughput_by_nodes(curve, _sizes(curve, attempts, size), config, usd)
    if scores is not None:
        warnings += scores[1]
    return RunFacts(
        name=run.name,
        path=run.path,
        kind="run",
        configuration=configuration,
        curve=curve,
        mesh=mesh,
        attempts=attempts,
        cancelled=any(sent.cancelled_at is not None for sent in read_submissions(run)[-1:]),
        used=used,
        lost=tuple(find_recoveries(history)),
        rates=tuple(found),
        saved=tuple(read_checkpoints(run, events, warnings)),
        scores=tuple(scores[0]) if scores is not None else (),
        spikes=None if curve is None else _spikes(curve, warnings),
        data=_or_warn(lambda: DataRecord.load(run.data) if run.data.is_file() else None, warnings),
        versions=_or_warn(lambda: _versions(run, attempts, warnings), warnings) or {},
        events=events,
        usd_per_node_hour=usd,
        warnings=tuple(_once(run, [*warnings, *used.warnings])),
    )


# Files that several readers look at, each with a warning of its own.
_SHARED = r"/(config\.yaml|data\.json|skips\.json|attempts/\d+/attempt\.json)"


def _once(run: RunDir, warnings: Sequence[str]) -> Iterator[str]:
    """Each warning once, and of a file that several readers met with one alone."""
    told: set[str] = set()
    for warning in dict.fromkeys(warnings):
        about = re.search(re.escape(str(run.path)) + _SHARED, warning)
        if about is None or about[0] not in told:
            yield warning
        if about is not None:
            told.add(about[0])


def _or_warn(read: Callable[[], T], warnings: list[str]) -> T | None:
    """What a part of a run holds; None, and a warning, where it cannot be read."""
    try:
        return read()
    except SlurmllmError as error:
        warnings.append(str(error))
    except OSError as error:
        warnings.append(f"cannot read {error.filename}: {error.strerror or error}")
    return None


def _history(run: RunDir, client: SlurmClient) -> RunHistory:
    return read_history(run, read_incarnations(read_submissions(run), client))


def _without_metrics(run: RunDir, history: RunHistory) -> Iterator[str]:
    for one in history.attempts:
        if one.stage == "train" and one.last_step is not None and one.attempt not in history.steps:
            yield (
                f"train attempt {one.attempt} made steps {one.first_step} to {one.last_step}, but "
                f"{run.metrics(one.attempt)} does not have them: none of its time counts as "
                "productive"
            )


def _price(price: float | PriceKind, config: RunConfig | None, warnings: list[str]) -> float | None:
    if isinstance(price, float):
        return price
    if config is None:
        return None
    try:
        return node_price(config.cluster, price)
    except ConfigError as error:
        warnings.append(" ".join([error.title, *error.faults]))
        return None


def _sizes(
    curve: Curve, attempts: Sequence[AttemptRecord], size: tuple[int, int] | None
) -> dict[int, tuple[int, int]]:
    """Attempt → its nodes and workers; those of the plan where no record tells."""
    known = {a.attempt: (len(a.nodes), a.world_size) for a in attempts if a.stage == "train"}
    if known or size is None:
        return known
    return dict.fromkeys(set(curve.attempts.tolist()), size)


def _events(run: RunDir, history: RunHistory, warnings: list[str]) -> Iterator[Event]:
    numbers = {attempt.attempt for attempt in history.attempts if attempt.stage == "train"}
    for number in sorted(numbers | set(history.steps)):
        left_out: list[int] = []
        yield from read_events(run, number, left_out)
        if left_out:
            more = f" and {len(left_out) - 1} more" if len(left_out) > 1 else ""
            warnings.append(
                f"{run.events(number)}:{left_out[0]}: no event that this version knows; the line"
                f"{more} left out: it is cut, or of a newer version of slurmllm"
            )


def _spikes(curve: Curve, warnings: list[str]) -> SpikeAnalysis | None:
    if "loss" not in curve.columns:
        return None
    return _or_warn(lambda: find_spikes(curve), warnings)


def _versions(
    run: RunDir, attempts: Sequence[AttemptRecord], warnings: list[str]
) -> dict[str, str]:
    """Of the nodes of the last attempt that wrote them down."""
    for attempt in reversed(attempts):
        folder = run.attempt(attempt.stage, attempt.attempt).path / "nodes"
        paths = sorted(folder.glob("*.json")) if folder.is_dir() else []
        records = [_or_warn(partial(NodeRecord.load, path), warnings) for path in paths]
        different: dict[str, set[str]] = defaultdict(set)
        for record in records:
            for name, version in ({} if record is None else record.versions).items():
                different[name].add(version)
        if different:
            return {name: ", ".join(sorted(found)) for name, found in different.items()}
    return {}


def make_names_unique(several: Sequence[RunFacts]) -> list[RunFacts]:
    """Sources of one name are told apart by a number."""
    given: dict[str, int] = {}
    found = []
    for facts in several:
        given[facts.name] = given.get(facts.name, 0) + 1
        count = given[facts.name]
        found.append(facts if count == 1 else replace(facts, name=f"{facts.name} ({count})"))
    return found
